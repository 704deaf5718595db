// The kernel behind solve.hpp: the forward's roles with other passes around the same conjugate gradients.
//   1. t (scores, G Vᵀ, U K with U = W (gamma - tau))   -> right-hand side; cached weights, live tiles
//   2. conjugate gradients, as in the forward           -> y
//   3. c = Σ λ x y + x·r from the last residual, without another pass
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward/solve.hpp"
#include "cuda/sm90/backward/target.cuh"
#include "cuda/sm90/solve/producer.cuh"
#include "cuda/sm90/solve/roles.cuh"
#include "cuda/tensor/backward/bounds.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct SolveProducer : Producer<Config> {
  __device__ __forceinline__ void run_item(int parity) {
    const ForwardItem b = this->feed.tiles[parity].item;
#pragma unroll 1
    for (int i = 0; i < b.tiles.count(); ++i) {
      this->load(this->values, b, i);
      this->load(this->keys, b, i);
    }
    const bool more = this->another_pass();
    const int live = this->feed.live[parity].total(b.tiles.count());
    this->solve(b, live, parity, more);  // the consumers let go of what was fetched for nothing
  }
};

template <class Config>
struct SolveConsumer : TargetPass<Config> {
  using Base = TargetPass<Config>;
  using Base::warpgroup, Base::next, Base::params, Base::parity, Base::rows, Base::shared, Base::feed;
  using typename Base::DirectionWords;
  using typename Base::Slot;
  using typename Base::Vector;
  static constexpr int kDim = Config::kDim;

  // dk follows y's error times x: where x·(q - mean key) is large, what rounding U once leaves in t and in y's first
  // steps shows in it. With attention on one key next to all (`balance`) or on many, the steps are small themselves.
  // Limits from emulation: every peaked kind is above them, of ordinary data only anisotropic keys at small λ.
  static constexpr float kLongTarget = 8 * Config::kDim, kLongSteps = 3 * Config::kDim;

  // Passes with U in two parts where x is long: later steps are small beside the solution.
  static constexpr int kTwoPartPasses = kDim / 4;

  // The scratch vector t is kept in: the saved mean value needs none.
  static constexpr int kTarget = WorkspaceLayout::kMeanV;

  const SolveParams& solve_params;

  // A row of a saved section as a fragment.
  __device__ __forceinline__ void load_saved(Vector& to, const float* section, int dim, const QueryBlock& block,
                                             const OwnRows& own_rows, const Lane& lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* row = section + row_index(params, block, own_rows.row[r]) * dim + lane.column;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const float2 v = 8 * i + lane.column < dim ? *reinterpret_cast<const float2*>(row + 8 * i) : make_float2(0, 0);
        to[4 * i + 2 * r] = v.x;
        to[4 * i + 2 * r + 1] = v.y;
      }
    }
  }
  // So that a later load_saved finds it near.
  __device__ __forceinline__ void prefetch_saved(const float* section, int dim, const QueryBlock& block,
                                                 const Lane& lane) const {
    constexpr int kLine = 32;  // floats
    const int row = min(this->tiles().first_row + lane.thread / 2, block.length_q - 1);
    const float* const from = section + row_index(params, block, row) * dim;
    for (int column = lane.thread % 2 * kLine; column < dim; column += 2 * kLine) {
      prefetch_to_l2(from + column);
    }
  }

  // Largest magnitudes of two rows of fp16 words in a tile.
  __device__ __forceinline__ void largest_of_tile(Pair<float>& largest, __half* tile, const Lane& lane) const {
    __half2 most[2] = {};
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const uint32_t word = tile_word<uint32_t>(tile, lane.tile_offset(i / 2, i & 1));
      most[i & 1] = __hmax2(most[i & 1], __habs2(*reinterpret_cast<const __half2*>(&word)));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = quad_max(fmaxf(__low2float(most[r]), __high2float(most[r])));
  }

  // t in units of the row, in which its largest element is between a half and one: it may be as small as rounding
  // leaves it (equal values), and nothing that is squared later may vanish for it.
  __device__ __forceinline__ void normalize(Vector& rhs, const ForwardItem& b, const OwnRows& own_rows,
                                            const Pair<RowScale>& g_scale, const HeadScales& head, const Lane& lane) {
    Pair<float> largest = {0, 0}, down;
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], fabsf(rhs[e]));
    const int value = exponent_above(head.value) - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = quad_max(largest[r]);
      const int norm = most > 0 ? exponent_above(most) : 0;
      down[r] = power_of_two(-norm);
      if (lane.column != 0 || !own_rows.exists[r]) continue;
      RowStart& start = solve_params.starts[row_index(params, b.block, own_rows.row[r])];
      start.norm = static_cast<int16_t>(norm);
      start.row_unit = static_cast<int16_t>(norm - value - (exponent_above(g_scale[r].or_one()) - 1));
    }
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) rhs[e] *= down[row_of(e)];
  }

  // x·(q - mean key) = Σ p E² + Σ λ x² of the warpgroup's rows, into shared memory. Threads side by side take a row,
  // eight columns each, so that few reads are under way at once and each is a whole line.
  __device__ __forceinline__ float* energies() const { return shared.behind_scales(warpgroup); }
  __device__ __forceinline__ void find_energies(const ForwardItem& b, const Lane& lane) {
    constexpr int kLanes = kDim / 8, kStep = kWarpgroupThreads / kLanes;
    const int column = lane.thread % kLanes, first_row = this->tiles().first_row;
#pragma unroll 4
    for (int row = lane.thread / kLanes; row < kWarpgroupRows; row += kStep) {
      const int64_t at =
          row_index(params, b.block, min(first_row + row, b.block.length_q - 1)) * params.dim + column * 8;
      const bool there = column * 8 < params.dim;
      const float4 zero = make_float4(0, 0, 0, 0);
      const auto part = [&](const float* from, int half) {
        return there ? __ldg(reinterpret_cast<const float4*>(from + at) + half) : zero;
      };
      const float4 x[2] = {part(params.saved.x, 0), part(params.saved.x, 1)};
      const float4 mean[2] = {part(params.saved.mean_k, 0), part(params.saved.mean_k, 1)};
      const uint4 words = tile_word<uint4>(shared.queries(warpgroup), tile_offset(row, column));
      const float back = (params.negative_scale ? -1.0f : 1.0f) / shared.row_scales(warpgroup)[row].word;
      const float2 q[4] = {unpack(words.x), unpack(words.y), unpack(words.z), unpack(words.w)};
      float energy = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        energy = fmaf(x[h].x, fmaf(q[2 * h].x, back, -mean[h].x), energy);
        energy = fmaf(x[h].y, fmaf(q[2 * h].y, back, -mean[h].y), energy);
        energy = fmaf(x[h].z, fmaf(q[2 * h + 1].x, back, -mean[h].z), energy);
        energy = fmaf(x[h].w, fmaf(q[2 * h + 1].y, back, -mean[h].w), energy);
      }
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) energy += __shfl_xor_sync(0xffffffffu, energy, mask);
      if (column == 0) energies()[row] = energy;
    }
  }

  // Saved statistics, G, t and the first direction; `two_part_passes`: passes of the solve with U in two parts. Returns
  // whether a row of this thread is to be solved.
  __device__ __forceinline__ bool prepare(const ForwardItem b, DirectionWords& direction, Direction& d,
                                          int& two_part_passes) {
    const Lane lane = Base::own_lane();
    const OwnRows own_rows(b.block, this->tiles().first_row, lane);
    const HeadScales head = this->tiles().head;
    Vector rhs, mean;
    // All that is read here is under way before any of it is used.
    load_saved(mean, params.saved.mean_v, params.value_dim, b.block, own_rows, lane);
    const RowLoader<kDim> g_rows(solve_params.g, params.value_dim, b.block, this->tiles().first_row, lane.thread,
                                 shared.spare_operand(warpgroup));
    g_rows.fetch();
    prefetch_saved(params.saved.mean_k, params.dim, b.block, lane);
    prefetch_saved(params.saved.x, params.dim, b.block, lane);
    Solve solve;
    Pair<bool> good;
    Pair<RowScale> q_scale, g_scale;
    Pair<float> shift = {0, 0};
    if (uniform(head.shifted)) {
      // Saved statistics are of the keys as they are. A bound of the logits that is too large by one does no harm.
      logit_shift<kDim>(shift, params, b.copy_index, shared.queries(warpgroup),
                        {rows.scale[0] * head.key, rows.scale[1] * head.key}, lane);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t index = row_index(params, b.block, own_rows.row[r]);
      const float bound = params.saved.max[index], omega = params.saved.omega[index];
      q_scale[r] = shared.row_scales(warpgroup)[lane.row + 8 * r];
      good[r] = q_scale[r].usable() && finite(bound) && finite(omega);
      rows.shift[r] = kWeightExponent - (good[r] ? bound - floorf(shift[r]) : 0.0f);
      solve.omega[r] = good[r] ? omega * exp2f(floorf(shift[r]) - shift[r]) * kWeightScale : 0.0f;
      solve.ridge[r] =
          params.ridge.per_dim ? 0.0f : scaled_ridge(row_ridge(params.ridge, b.block, own_rows.row[r]), head.key);
      good[r] = good[r] && solve.ridge[r] >= 0;
    }
    find_energies(b, lane);
    this->sync_warpgroup();  // every thread has read the scales of the queries
    g_rows.template write<false>(shared.row_scales(warpgroup), 1.0f);
    fence_async_proxy();
    this->sync_warpgroup();

    Pair<float> tau = {0, 0}, squares = {0, 0}, largest_q, largest_g;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const float2 g = unpack(tile_word<uint32_t>(shared.spare_operand(warpgroup), lane.tile_offset(i / 2, i & 1)));
      squares[i & 1] += g.x * g.x + g.y * g.y;
      tau[i & 1] += g.x * (mean[2 * i] * head.value) + g.y * (mean[2 * i + 1] * head.value);
    }
    largest_of_tile(largest_q, shared.queries(warpgroup), lane);
    largest_of_tile(largest_g, shared.spare_operand(warpgroup), lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      g_scale[r] = shared.row_scales(warpgroup)[lane.row + 8 * r];
      squares[r] = quad_sum(squares[r]);
      const float sum = quad_sum(tau[r]);
      good[r] = good[r] && g_scale[r].usable() && finite(sum) && finite(largest_q[r]) && finite(largest_g[r]);
      tau[r] = good[r] ? sum : 0.0f;
    }
    if (lane.column == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!own_rows.exists[r]) continue;
        const int g_exponent = 1 - exponent_above(g_scale[r].word);  // of what undoes G's scale
        RowStart start{};
        start.q = static_cast<int16_t>(plus(exponent_above(largest_q[r]), 1 - exponent_above(q_scale[r].word)));
        start.g = static_cast<int16_t>(plus(exponent_above(largest_g[r]), g_exponent));
        start.g_norm = static_cast<int16_t>(plus(exponent_above(sqrtf(squares[r]) * 1.0001f), g_exponent));
        start.tau = tau[r];
        solve_params.starts[row_index(params, b.block, own_rows.row[r])] = start;
      }
    }
    // Values are scaled below 2^15, so their norm is below 2^15 sqrt(dim).
    finish_direction(d, squares, tau, 0x1p15f * (kDim == 64 ? 8.0f : 11.3138f), {0, 0});
    const Pair<float> energy = {energies()[lane.row], energies()[lane.row + 8]};
    SolveMemory::store_course(this->row_state(), {{0, 0}, {0, 0}, {energy[0], energy[1]}, {0, 0}}, lane);
    const auto matters = [&](int r, float factor, float limit) {  // a row without gradient does not
      return largest_g[r] > 0 && good[r] && factor * energy[r] > limit;
    };
    const bool few = this->few_keys();
    const bool long_x = named_any(kWarpgroupBarrier + warpgroup, kWarpgroupThreads,
                                  matters(0, 1, kLongTarget) || matters(1, 1, kLongTarget));
    Pair<float> sums, largest;
    this->target_pass(rhs, sums, largest, d, few || uniform(long_x) != 0);
    load_saved(mean, params.saved.mean_k, params.dim, b.block, own_rows, lane);
    if (uniform(head.shifted)) {
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        const float2 c = key_shift<kDim>(params, b.copy_index, i / 2, lane);
        const float seen =
            solve.omega[i & 1] > 0 ? 1.0f : 0.0f;  // a row without keys has the mean zero, shifted or not
        mean[2 * i] -= seen * c.x, mean[2 * i + 1] -= seen * c.y;
      }
    }
    const auto long_steps = [&](int r) {
      return matters(r, Base::balance_of(largest[r], solve.omega[r]), kLongSteps) && matters(r, 1, kLongTarget);
    };
    two_part_passes =
        uniform(named_any(kWarpgroupBarrier + warpgroup, kWarpgroupThreads, long_steps(0) || long_steps(1)))
            ? kTwoPartPasses
            : 0;
    if (few) two_part_passes = params.two_part_passes;
    if (lane.column == 0) {
      Pair<KeyRange> keys;
      this->visible(keys, lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The sum of weights may be too small by an ulp or two for every 16 keys: tensor cores round their sums down.
        const float lost = 0x1p-26f * (keys[r].end - keys[r].begin);
        const float rest = solve.omega[r] > 0 ? fmaxf(solve.omega[r] - largest[r], 0.0f) / solve.omega[r] + lost : 1.0f;
        if (!own_rows.exists[r]) continue;
        solve_params.starts[row_index(params, b.block, own_rows.row[r])].rest =
            static_cast<int16_t>(rest_exponent(rest));
      }
    }

    Pair<float> undo;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool weighted = good[r] && solve.omega[r] > 0 && d.scale[r] > 0;
      undo[r] = weighted ? 1.0f / (solve.omega[r] * d.scale[r]) : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      mean[e] = good[r] ? mean[e] * head.key : 0.0f;
      rhs[e] = good[r] ? fmaf(-sums[r], mean[e], rhs[e]) * undo[r] : 0.0f;
    }
    if (params.ridge.per_dim) {
      load_ridge<kDim>(this->section(WorkspaceLayout::kRidge), rhs, mean, solve.ridge, good, params, b.block,
                       own_rows.row, head.key, lane);
    }
    normalize(rhs, b, own_rows, g_scale, head, lane);
    Fragment<kDim>::store_half(reinterpret_cast<uint4*>(this->section(WorkspaceLayout::kMeanHalf)), mean, lane.thread);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      solve.active[r] = good[r] && own_rows.exists[r] && solve.omega[r] > 0 && solve.ridge[r] < INFINITY;
    }
    start_solve<kDim>(solve, rhs);
#pragma unroll
    for (int r = 0; r < 2; ++r) solve.status[r] = good[r] ? LLA_ROW_OK : LLA_ROW_NAN;
    this->sync_warpgroup();  // G has been read by all
    Fragment<kDim>::store(shared.residual[warpgroup], rhs, lane.thread);
    Fragment<kDim>::store(this->section(kTarget), rhs, lane.thread);
    make_direction<kDim>(direction, rhs, mean, head.key_norm, solve, d);
    Fragment<kDim>::fill(this->section(WorkspaceLayout::kX), 0.0f, lane.thread);
    SolveMemory::store(this->row_state(), solve, lane);
    if constexpr (Config::kCached) fence_async_proxy_global();  // the copy engine will read the weights
    return solve.active[0] || solve.active[1];
  }

  // Exponents above the largest element and the norm of two rows; |v|² in `squares`.
  static constexpr int kNotFinite = 1000;  // in place of the largest
  __device__ __forceinline__ void sizes_of(Pair<Size>& sizes, Pair<float>& squares, const Vector& v) const {
    Pair<float> largest = {0, 0};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], fabsf(v[e]));
    Pair<float> down;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sizes[r].largest = exponent_above(quad_max(largest[r]));
      down[r] = power_of_two(-sizes[r].largest);  // keeps the squares in range
      squares[r] = 0;
    }
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const float scaled = v[e] * down[row_of(e)];
      squares[row_of(e)] = fmaf(scaled, scaled, squares[row_of(e)]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      squares[r] = quad_sum(squares[r]);
      if (!finite(squares[r])) sizes[r].largest = kNotFinite;
      sizes[r].norm = plus(sizes[r].largest, exponent_above(sqrtf(squares[r]) * 1.0001f));
      const float up = power_of_two(sizes[r].largest);
      squares[r] = squares[r] * up * up;
    }
  }

  // y and what goes with it: c, sizes and bounds for the operands, the info of the rows.
  __device__ __forceinline__ void write_rows(const ForwardItem b) {
    const Lane lane = Base::own_lane();
    const OwnRows own_rows(b.block, this->tiles().first_row, lane);
    const HeadScales head = this->tiles().head;
    const float back = 1.0f / head.key;
    SolveMemory::Words state;
    SolveMemory::fetch(state, this->row_state(), lane);
    Vector y, x;
    Fragment<kDim>::load(y, this->section(WorkspaceLayout::kX), lane.thread);
    load_saved(x, params.saved.x, params.dim, b.block, own_rows, lane);
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) x[e] *= back;  // in units of the scaled keys, like y
    RowStart start[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) start[r] = solve_params.starts[row_index(params, b.block, own_rows.row[r])];
    Solve solve;
    SolveMemory::unpack(state, solve);
    // Σ λ x², Σ λ y² and y·(t - r) = y·A y.
    Pair<float> c = {0, 0}, ridge_x = {0, 0}, ridge_y = {0, 0}, energy = {0, 0};
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float4 r4 =
          reinterpret_cast<const float4*>(shared.residual[warpgroup])[i * kWarpgroupThreads + lane.thread];
      const float4 t4 = reinterpret_cast<const float4*>(this->section(kTarget))[i * kWarpgroupThreads + lane.thread];
      float4 l4 = make_float4(solve.ridge[0], solve.ridge[0], solve.ridge[1], solve.ridge[1]);
      if (params.ridge.per_dim) {
        l4 = reinterpret_cast<const float4*>(
            this->section(WorkspaceLayout::kRidge))[i * kWarpgroupThreads + lane.thread];
      }
      const float residual[4] = {r4.x, r4.y, r4.z, r4.w}, target[4] = {t4.x, t4.y, t4.z, t4.w};
      const float lambda[4] = {l4.x, l4.y, l4.z, l4.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = 4 * i + j, r = j / 2;
        const float ridge = lambda[j] < INFINITY ? lambda[j] : 0.0f;
        c[r] = fmaf(x[e], fmaf(ridge, y[e], residual[j]), c[r]);
        ridge_x[r] = fmaf(ridge * x[e], x[e], ridge_x[r]);
        ridge_y[r] = fmaf(ridge * y[e], y[e], ridge_y[r]);
        energy[r] = fmaf(y[e], target[j] - residual[j], energy[r]);
      }
    }
    Pair<Size> x_size, y_size;
    Pair<float> x_squared, y_squared;
    Course course;
    SolveMemory::fetch_course(course, this->row_state(), lane);
    sizes_of(x_size, x_squared, x);
    sizes_of(y_size, y_squared, y);
    const int key_exponent = exponent_above(head.key) - 1;  // of what gives x and y their true size
    const int key_norm = exponent_above(head.key_norm / head.key);
    const int value_norm =
        value_norm_exponent(__uint_as_float(params.heads[b.copy_index].largest_value), params.value_dim);
    uint32_t most[kHeadBounds] = {};
    Pair<KeyRange> keys;
    this->visible(keys, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      c[r] = quad_sum(c[r]);
      ridge_x[r] = quad_sum(ridge_x[r]);
      const float variance = quad_sum(energy[r]) - quad_sum(ridge_y[r]);
      const RowExponents exponents =
          row_exponents(start[r].q, start[r].g, plus(x_size[r].largest, key_exponent),
                        plus(y_size[r].largest, key_exponent + start[r].row_unit), start[r].g_norm,
                        plus(x_size[r].norm, key_exponent), plus(y_size[r].norm, key_exponent + start[r].row_unit),
                        key_norm, value_norm, start[r].rest, energy_exponent(course.note[r]));
      const bool bad = solve.status[r] == LLA_ROW_NAN || x_size[r].largest == kNotFinite ||
                       y_size[r].largest == kNotFinite || !finite(c[r]);
      const bool zero = !bad && start[r].g == kNoExponent;
      if (!own_rows.exists[r]) continue;
      if (!bad && !zero) {
        uint32_t bounds[kHeadBounds];
        row_bounds(bounds, exponents);
#pragma unroll
        for (int f = 0; f < kHeadBounds; ++f) most[f] = max(most[f], bounds[f]);
      }
      const int64_t index = row_index(params, b.block, own_rows.row[r]);
      float* const row = solve_params.y + index * kDim + lane.column;
      const float scale = bad ? NAN : 1.0f;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        *reinterpret_cast<float2*>(row + 8 * i) = make_float2(y[4 * i + 2 * r] * scale, y[4 * i + 2 * r + 1] * scale);
      }
      if (lane.column != 0) continue;
      RowSizes sizes;
      sizes.alpha = bad ? kBadRow : zero ? kZeroRow : static_cast<int16_t>(exponents.alpha);
      sizes.beta = static_cast<int16_t>(exponents.beta);
      sizes.both = static_cast<int16_t>(exponents.both);
      sizes.row_unit = start[r].row_unit;
      sizes.tau = start[r].tau * power_of_two(-start[r].norm);
      sizes.c = c[r];
      // A row that was not solved has seen no curvature.
      const bool low =
          solve.iterations[r] == 0 || solve_params.low_parts.of_y(y_squared[r], solve.curvature[r], variance);
      sizes.low = low ? INFINITY : solve_params.low_parts.least(x_squared[r], solve.curvature[r], ridge_x[r]);
      if (bad || zero) sizes.low = -INFINITY;
      solve_params.sizes[index] = sizes;
      if (params.info.iterations != nullptr) params.info.iterations[index] = solve.iterations[r];
      const float balance = power_of_two(smaller(start[r].rest, -1));
      // y·mean is not at hand, so the bound.
      const float noise = 0x1p-48f * y_squared[r] * (head.key_norm * head.key_norm);
      const float told = told_residual(solve, r, balance, course.steps[r], 0, noise, head.key_norm, params.dim,
                                       keys[r].end - keys[r].begin);
      if (params.info.residual != nullptr) params.info.residual[index] = told;
      if (params.info.status != nullptr) params.info.status[index] = this->told_status(solve, r, told);
    }
    raise_bounds(&solve_params.bounds[b.copy_index], most);
  }

  __device__ __forceinline__ void run_item() {
    DirectionWords direction;
    Direction d;
    this->begin();
    int two_part_passes;
    const bool active = prepare(this->tiles().item, direction, d, two_part_passes);
    const bool more = this->publish(active);
    const int live = this->live_tiles();
    if (more) {
      this->template solve<true>(direction, d, live, two_part_passes);
      this->tell(false);
      release_ahead(min(live, kTilesAhead));
    }
    write_rows(this->tiles().item);
  }

  // After a pass the producer has fetched the first tiles and weights of one more.
  __device__ __forceinline__ void release_ahead(int ahead) {
    for (int i = 0; i < ahead; ++i) {
      const Slot slot = next.take();
      feed.ring.wait(slot);
      feed.ring.release(slot);
      if constexpr (Config::kCached) {
        const auto weights = this->next_weights.take();
        shared.weight_ring[warpgroup].wait(weights);
        shared.weight_ring[warpgroup].release(weights);
      }
    }
  }
};

template <int kDim, bool kCached>
__global__ void __launch_bounds__(ForwardConfig<kDim, kCached>::kThreads, 1)
    solve_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                 const __grid_constant__ SolveParams params) {
  using Config = ForwardConfig<kDim, kCached>;
  auto& shared = *reinterpret_cast<ForwardShared<Config>*>(dynamic_tiles);
  shared.init();
  wait_for_last_kernel();
  const int warpgroup = own_warpgroup();
  SolveProducer<Config> producer{
      {shared, params, &keys, &values, params.weights + blockIdx.x * params.weights_stride, own_warp()}};
  SolveConsumer<Config> consumer{{{{shared, params, warpgroup - 1}}}, params};
  run_roles<Config>(warpgroup, producer, consumer);
}

template <int kDim, bool kCached>
Status launch_solve(const CUtensorMap& keys, const CUtensorMap& values, const SolveParams& params, int workers,
                    cudaStream_t stream) {
  using Config = ForwardConfig<kDim, kCached>;
  return launch_early(solve_kernel<kDim, kCached>, dim3(static_cast<unsigned>(workers)), Config::kThreads,
                      sizeof(ForwardShared<Config>), stream, "the solve of the backward pass", keys, values, params);
}

}  // namespace lla::cuda::sm90
