// A consumer warpgroup: 64 queries of a block through all passes over their keys.
//   1. means (scores, W K)                         -> ω, mean key; cached weights
//   2. conjugate gradients (scores, d Kᵀ, U K)     -> x; without the scores when weights are cached
//   3. mean value (scores, W V)                    -> if it is to be saved, or o needs it
//   4. output (scores, x Kᵀ high and low, U V)     -> o; without the low part where it cannot show
#pragma once

#include "cuda/sm90/solve/solver.cuh"
#include "cuda/tensor/output_direction.cuh"
#include "cuda/tensor/rows_io.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct ForwardConsumer : Solver<Config> {
  using Base = Solver<Config>;
  using Base::warpgroup, Base::params, Base::parity, Base::rows, Base::shared, Base::feed, Base::tiles;
  using typename Base::DirectionWords;
  using typename Base::Parts;
  using typename Base::Vector;
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys;

  // The bound M of the logits is needed before any of them is known. No logit exceeds |q| max|k|; keys that do not
  // point along the query stay below half of it. A guess that turns out too low, or so high that weights would lose
  // bits, is corrected, and the pass repeated.
  __device__ __forceinline__ void guess_bounds() {
    const Lane lane = Base::own_lane();
    Pair<float> squares = {0, 0};
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const float2 q = unpack(tile_word<uint32_t>(shared.queries(warpgroup), lane.tile_offset(i / 2, i & 1)));
      squares[i & 1] += q.x * q.x + q.y * q.y;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = sqrtf(quad_sum(squares[r])) * tiles().head.key_norm * rows.scale[r];
      rows.shift[r] = kWeightExponent - ceilf(fmaxf(0.5f * most, fminf(most, 0.5f * kLooseBits)));
    }
  }
  // From the largest raw scores. Returns whether a row of this thread was wrong; `bounds` are the tight ones.
  __device__ __forceinline__ bool correct_bounds(Pair<float>& bounds, const Pair<float>& largest) {
    bool wrong = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float guess = kWeightExponent - rows.shift[r];
      bounds[r] = largest[r] == -INFINITY ? guess : ceilf(largest[r] * rows.scale[r]);
      if (guess == bounds[r]) continue;  // also where logits overflow: a corrected bound is not corrected again
      if (guess > bounds[r] && guess - bounds[r] <= kLooseBits) continue;
      rows.shift[r] = kWeightExponent - bounds[r];
      wrong = true;
    }
    return wrong;
  }

  // ω and mean keys, the tight bounds of the logits, and how far from 0 and 1 the largest weight is.
  __device__ __forceinline__ void find_means(Vector& mean, Pair<float>& omega, Pair<float>& bounds,
                                             Pair<float>& balance) {
    Pair<float> largest;
    do {
      this->means_pass(mean, omega, largest);
    } while (this->publish(correct_bounds(bounds, largest)));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // As the sum has it: beside what rounding takes from it the other weights may be nothing.
      const __half rounded = __float2half_rn(exp2_fast(fmaf(largest[r], rows.scale[r], rows.shift[r])));
      balance[r] = Base::balance_of(__half2float(rounded), omega[r]);
    }
    const Pair<float> inverse = {reciprocal(omega[0]), reciprocal(omega[1])};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      mean[e] = divide(mean[e], omega[r], inverse[r]);
    }
  }

  // The scratch vector the right-hand side is kept in: the mean value is made after the solve.
  static constexpr int kTarget = WorkspaceLayout::kMeanV;

  // So that prepare need not wait for it behind the means.
  __device__ __forceinline__ void prefetch_ridge(const Lane& lane) const {
    const ForwardItem b = tiles().item;
    const OwnRows own_rows(b.block, tiles().first_row, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) touch(row_ridge_at(params.ridge, b.block, own_rows.row[r]));
  }

  // Means, right-hand side, ridge and the first direction. Returns whether a row of this thread is to be solved.
  __device__ __forceinline__ bool prepare(DirectionWords& direction, Direction& d) {
    Solve solve;
    Vector mean;
    Pair<float> bounds, balance;
    const Lane lane = Base::own_lane();
    prefetch_ridge(lane);
    find_means(mean, solve.omega, bounds, balance);
    SolveMemory::store_course(this->row_state(), {{0, 0}, {0, 0}, {balance[0], balance[1]}, {0, 0}}, lane);
    Fragment<kDim>::store(this->section(WorkspaceLayout::kMeanK), mean, lane.thread);

    const ForwardItem b = tiles().item;
    const OwnRows own_rows(b.block, tiles().first_row, lane);
    const HeadScales head = tiles().head;
    Pair<bool> good;
    Pair<uint32_t> marks;
    Pair<KeyRange> keys;
    this->visible(keys, lane);
    marks_seen(marks, params, head, b.key_row, keys, lane);
    Pair<float> back;  // fp16 query -> query in units of the keys
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowScale q_scale = shared.row_scales(warpgroup)[lane.row + 8 * r];
      good[r] = q_scale.usable() && !(marks[r] & kNotFinite);
      back[r] = (params.negative_scale ? -head.key : head.key) / q_scale.or_one();
      solve.ridge[r] =
          params.ridge.per_dim ? 0.0f : scaled_ridge(row_ridge(params.ridge, b.block, own_rows.row[r]), head.key);
      good[r] = good[r] && solve.ridge[r] >= 0;
    }
    Vector rhs;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const float2 q = unpack(tile_word<uint32_t>(shared.queries(warpgroup), lane.tile_offset(i / 2, i & 1)));
      rhs[2 * i] = fmaf(q.x, back[i & 1], -mean[2 * i]);
      rhs[2 * i + 1] = fmaf(q.y, back[i & 1], -mean[2 * i + 1]);
    }
    Pair<float> shift = {0, 0};  // of the logits
    if (uniform(head.shifted)) {
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        const float2 c = key_shift<kDim>(params, b.copy_index, i / 2, lane);
        rhs[2 * i] = fmaf(-head.key, c.x, rhs[2 * i]);
        rhs[2 * i + 1] = fmaf(-head.key, c.y, rhs[2 * i + 1]);
      }
      logit_shift<kDim>(shift, params, b.copy_index, shared.queries(warpgroup),
                        {rows.scale[0] * head.key, rows.scale[1] * head.key}, lane);
    }
    if (params.ridge.per_dim) {
      load_ridge<kDim>(this->section(WorkspaceLayout::kRidge), rhs, mean, solve.ridge, good, params, b.block,
                       own_rows.row, head.key, lane);
    }
    Fragment<kDim>::store_half(reinterpret_cast<uint4*>(this->section(WorkspaceLayout::kMeanHalf)), mean, lane.thread);
    Pair<bool> several;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      several[r] = keys[r].end - keys[r].begin > 1;  // one key is its own mean: o = v whatever x is
      solve.active[r] = good[r] && own_rows.exists[r] && several[r] && solve.omega[r] > 0 && solve.ridge[r] < INFINITY;
    }
    start_solve<kDim>(solve, rhs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      solve.status[r] = !good[r] ? LLA_ROW_NAN : marks[r] & kTooSmall ? LLA_ROW_PRECISION : LLA_ROW_OK;
      solve.loose[r] = min(max(static_cast<int>(kWeightExponent - rows.shift[r] - bounds[r]), 0), 15);
      if (several[r]) continue;
      solve.rr_start[r] = 0;  // there is nothing to solve
      if (good[r] && solve.omega[r] > 0 && solve.ridge[r] == 0) solve.status[r] = LLA_ROW_BREAKDOWN;
    }
    if (params.saved.x != nullptr && lane.column == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!own_rows.exists[r]) continue;
        const int64_t index = row_index(params, b.block, own_rows.row[r]);
        const bool seen = solve.omega[r] > 0;
        const float whole = ceilf(shift[r]);
        params.saved.max[index] = !good[r] ? NAN : seen ? bounds[r] + whole : 0.0f;
        params.saved.omega[index] =
            !good[r] ? NAN
            : seen   ? ldexpf(solve.omega[r] / kWeightScale, solve.loose[r]) * exp2f(shift[r] - whole)
                     : 0.0f;
      }
    }
    this->sync_warpgroup();  // the scales of the queries have been read by all
    Fragment<kDim>::store(shared.residual[warpgroup], rhs, lane.thread);
    Fragment<kDim>::store(this->section(kTarget), rhs, lane.thread);
    make_direction<kDim>(direction, rhs, mean, head.key_norm, solve, d);
    Fragment<kDim>::fill(this->section(WorkspaceLayout::kX), 0.0f, lane.thread);
    SolveMemory::store(this->row_state(), solve, lane);
    if constexpr (Config::kCached) fence_async_proxy_global();  // the copy engine will read the weights
    return solve.active[0] || solve.active[1];
  }

  // ---- what rounding U left behind ---------------------------------------------------------------------------------

  // Whether what rounding U in the steps so far may have left in x shows, in a row of this thread: beside the solution,
  // in which it stays, or in the residual, which does not show it.
  __device__ __forceinline__ bool drifted() const {
    const Lane lane = Base::own_lane();
    Solve solve;
    Course course;
    SolveMemory::load(this->row_state(), solve, lane);
    SolveMemory::fetch_course(course, this->row_state(), lane);
    const float key_norm = tiles().head.key_norm;
    bool shows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shows |= goes_on(solve, r) && drift_shows(params.tolerance_squared, solve.rr_start[r], course.note[r],
                                                course.steps[r], course.size[r], key_norm);
    }
    return shows;
  }
  // A row that was solved, or would be with more steps.
  __device__ __forceinline__ static bool goes_on(const Solve& solve, int r) {
    return solve.rr_start[r] > 0 && (solve.status[r] == LLA_ROW_OK || solve.status[r] == LLA_ROW_PRECISION);
  }

  // x, rounded to fp16 (part 0) or what that leaves over (part 1), as the direction of a pass; `back`: what undoes its
  // power of two.
  __device__ __forceinline__ void make_part(DirectionWords& direction, Direction& d, Pair<float>& back, int part,
                                            const Pair<int>& loose, const Lane& lane) const {
    Vector x, mean;
    Fragment<kDim>::load(x, this->section(WorkspaceLayout::kX), lane.thread);
    Fragment<kDim>::load(mean, this->section(WorkspaceLayout::kMeanK), lane.thread);
    Pair<float> scale, squares = {0, 0}, dots = {0, 0};
    scale_rows<kDim>(scale, x);
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const int r = i & 1;
      const float a = x[2 * i] * scale[r], b = x[2 * i + 1] * scale[r];
      direction[i] = pack(a, b);
      float2 rounded = unpack(direction[i]);
      if (part == 1) {
        direction[i] = pack(a - rounded.x, b - rounded.y);
        rounded = unpack(direction[i]);
      }
      squares[r] += rounded.x * rounded.x + rounded.y * rounded.y;
      dots[r] += rounded.x * mean[2 * i] + rounded.y * mean[2 * i + 1];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      squares[r] = quad_sum(squares[r]);
      dots[r] = quad_sum(dots[r]);
      back[r] = inverse_power_of_two(scale[r]);
    }
    finish_direction(d, squares, dots, tiles().head.key_norm, loose);
  }

  // The residual itself, b - A x, with x and U in two parts: two passes over the keys. Rows that are then above what is
  // wanted go on from there. Returns whether one does.
  __device__ __forceinline__ bool refresh(DirectionWords& direction, Direction& d, int live) {
    const Lane lane = Base::own_lane();
    Solve solve;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      SolveMemory::load(this->row_state(), solve, lane);
      Pair<float> back, undo;
      make_part(direction, d, back, part, solve.loose, lane);
      Vector acc;
      Pair<float> sums;
      this->template weighted_pass<false>(acc, sums, direction, Parts::high, d, live, true);
      SolveMemory::load(this->row_state(), solve, lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float units = solve.omega[r] * d.scale[r];
        undo[r] = units > 0 ? back[r] / units : 0.0f;
      }
      subtract_part(acc, sums, undo, part, solve, lane);
      if (part == 0) this->publish(true);
    }
    return this->publish(restart(direction, d, lane));
  }
  // r = b - Λ x - (the product with x's high part), then less that with its low part.
  __device__ __forceinline__ void subtract_part(const Vector& product, const Pair<float>& sums, const Pair<float>& undo,
                                                int part, const Solve& solve, const Lane& lane) const {
    float4* const residual = reinterpret_cast<float4*>(shared.residual[warpgroup]) + lane.thread;
    const auto section = [&](int which) { return reinterpret_cast<const float4*>(this->section(which)) + lane.thread; };
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      keep_order();
      const float4 m4 = __ldcg(section(WorkspaceLayout::kMeanK) + i * kWarpgroupThreads);
      float4 from = residual[i * kWarpgroupThreads], x4 = make_float4(0, 0, 0, 0);
      if (part == 0) {
        from = __ldcg(section(kTarget) + i * kWarpgroupThreads);
        x4 = __ldcg(section(WorkspaceLayout::kX) + i * kWarpgroupThreads);
      }
      float4 l4 = make_float4(solve.ridge[0], solve.ridge[0], solve.ridge[1], solve.ridge[1]);
      if (params.ridge.per_dim) l4 = __ldcg(section(WorkspaceLayout::kRidge) + i * kWarpgroupThreads);
      const float m[4] = {m4.x, m4.y, m4.z, m4.w}, f[4] = {from.x, from.y, from.z, from.w};
      const float x[4] = {x4.x, x4.y, x4.z, x4.w}, l[4] = {l4.x, l4.y, l4.z, l4.w};
      float out[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float data = undo[j / 2] * fmaf(-sums[j / 2], m[j], product[4 * i + j]);
        out[j] = l[j] < INFINITY ? fmaf(-l[j], x[j], f[j]) - data : 0.0f;  // +inf: projected out
      }
      residual[i * kWarpgroupThreads] = make_float4(out[0], out[1], out[2], out[3]);
    }
  }
  // Conjugate gradients from the residual there is. Returns whether a row of this thread goes on.
  __device__ __forceinline__ bool restart(DirectionWords& direction, Direction& d, const Lane& lane) {
    Solve solve;
    Course course;
    Vector r, mean;
    SolveMemory::load(this->row_state(), solve, lane);
    SolveMemory::fetch_course(course, this->row_state(), lane);
    Pair<float> squares = {0, 0};
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float4 v = reinterpret_cast<const float4*>(shared.residual[warpgroup])[i * kWarpgroupThreads + lane.thread];
      r[4 * i] = v.x, r[4 * i + 1] = v.y, r[4 * i + 2] = v.z, r[4 * i + 3] = v.w;
      squares[0] = fmaf(v.x, v.x, fmaf(v.y, v.y, squares[0]));
      squares[1] = fmaf(v.z, v.z, fmaf(v.w, v.w, squares[1]));
    }
    const StepLimits limits = this->step_limits();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float now = quad_sum(squares[h]), start = solve.rr_start[h];
      const bool row = goes_on(solve, h);
      const bool solved = now <= limits.template wanted<false>(start, solve.ridge[h], course.size[h]);
      const bool last = solve.iterations[h] >= limits.max_iterations;
      if (row) solve.rr[h] = now;
      if (row && last && !(now <= limits.tolerance_squared * start)) solve.status[h] = LLA_ROW_MAX_ITERATIONS;
      solve.active[h] = row && !solved && !last;
      course.steps[h] = 0;
      course.along[h] = NAN;
    }
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) r[e] = solve.active[row_of(e)] ? r[e] : 0.0f;
    Fragment<kDim>::load(mean, this->section(WorkspaceLayout::kMeanK), lane.thread);
    make_direction<kDim>(direction, r, mean, tiles().head.key_norm, solve, d);
    SolveMemory::store(this->row_state(), solve, lane);
    SolveMemory::store_course(this->row_state(), course, lane);
    return solve.active[0] || solve.active[1];
  }

  static constexpr int kMostRefreshes = 2;

  // Returns whether the residual was formed anew: then the output pass has U in two parts, too.
  __device__ __forceinline__ bool solve_rows(DirectionWords& direction, Direction& d, int live) {
    int refreshes = 0;
    for (bool more = true; more; ++refreshes) {
      this->template solve<false>(direction, d, live, 0);
      const bool again = this->any(refreshes < kMostRefreshes && drifted());
      this->tell(again);
      if (!again) break;
      more = refresh(direction, d, live);
    }
    return refreshes > 0;
  }

  __device__ __forceinline__ void run_item() {
    DirectionWords direction;
    Direction d;
    this->begin();
    guess_bounds();
    const bool active = prepare(direction, d);
    const bool more = this->publish(active);
    const int live = this->live_tiles();
    const bool refreshed = more && solve_rows(direction, d, live);
    const bool two_parts = this->few_keys() || refreshed;
    const Needs needs = write_x(direction, d);
    if (this->publish(needs.mean_value)) {
      write_mean_value(direction, live);
      this->publish(false);
    }
    Vector acc;
    Pair<float> sums;
    this->template weighted_pass<true>(acc, sums, direction, needs.low_part ? Parts::both : Parts::high, d, live,
                                       two_parts);
    write_output(acc, sums, needs);
  }

  // Whether a row of this thread needs what rounding x to fp16 leaves over. All in units of the scaled keys; x·(q -
  // mean) is at least |q - mean|² over the largest curvature.
  __device__ __forceinline__ bool needs_low_part(const Pair<float>& squares, const Solve& solve) const {
    if (tiles().few_keys || params.ridge.per_dim) return true;
    bool low = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float square = squares[r];
      const float least = params.low_parts.least(square, solve.curvature[r], solve.ridge[r] * square);
      low |= square > 0 && !(least <= solve.rr_start[r] / solve.curvature[r]);
    }
    return low;
  }

  // Σ U should be ω, but tensor cores round the sums behind the mean key down, by about 2^-25 for every 16 keys. With
  // that x·mean is off, and so is Σ U v, by the mean value times it. Whether it shows.
  __device__ __forceinline__ void needs_mean_value(Pair<bool>& needs, const Vector& x, const Vector& mean) const {
    Pair<float> products = {0, 0};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) products[row_of(e)] = fmaf(fabsf(x[e]), fabsf(mean[e]), products[row_of(e)]);
    const float steps = static_cast<float>(tiles().count * (kKeys / 16));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      needs[r] = !(0x1p-25f * steps * quad_sum(products[r]) <= params.sum_error);
    }
  }

  // Of the output pass.
  struct Needs {
    bool low_part, mean_value;
  };
  // x as the direction of the output pass.
  __device__ __forceinline__ Needs write_x(DirectionWords& direction, Direction& d) {
    const Lane lane = Base::own_lane();
    const HeadScales head = tiles().head;
    Vector x, mean;
    Solve solve;
    SolveMemory::load(this->row_state(), solve, lane);
    Fragment<kDim>::load(x, this->section(WorkspaceLayout::kX), lane.thread);
    Fragment<kDim>::load(mean, this->section(WorkspaceLayout::kMeanK), lane.thread);
    // All threads are then done with the residual, whose place takes x's low part.
    Course course;
    SolveMemory::fetch_course(course, this->row_state(), lane);
    Pair<float> squares = {0, 0}, with_mean = {0, 0};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      squares[row_of(e)] = fmaf(x[e], x[e], squares[row_of(e)]);
      with_mean[row_of(e)] = fmaf(x[e], mean[e], with_mean[row_of(e)]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      squares[r] = quad_sum(squares[r]);
      course.along[r] = sum_noise_squared(squares[r], quad_sum(with_mean[r]), head.key_norm, params.dim);
    }
    const bool low = this->any(needs_low_part(squares, solve));
    SolveMemory::store_course(this->row_state(), course, lane);
    Pair<float> one;
    make_output_direction<kDim>(direction, x, mean, shared.spare_operand(warpgroup), low, lane, head, solve.loose, d,
                                one);
    Pair<bool> value;
    needs_mean_value(value, x, mean);
    if (lane.column == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shared.output_units(warpgroup)[lane.row + 8 * r] = OutputUnit::of(one[r], value[r]);
      }
    }
    fence_async_proxy();
    const bool any =
        named_any(kWarpgroupBarrier + warpgroup, kWarpgroupThreads, params.saved.x != nullptr || value[0] || value[1]);
    return {low, uniform(any) != 0};
  }

  __device__ __forceinline__ void write_mean_value(const DirectionWords& direction, int live) {
    Vector mean;
    Pair<float> omega;
    this->template weighted_pass<true>(mean, omega, direction, Parts::none, {{0, 0}, {-1, -1}}, live, false);
    const Pair<float> inverse = {reciprocal(omega[0]), reciprocal(omega[1])};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) mean[e] = divide(mean[e], omega[row_of(e)], inverse[row_of(e)]);
    Fragment<kDim>::store(this->section(WorkspaceLayout::kMeanV), mean, Base::own_lane().thread);
  }

  // x, mean keys and mean values, which wait in the scratch memory.
  __device__ __forceinline__ void save_vectors(const QueryBlock& block, int copy_index, const HeadScales& head,
                                               const Solve& solve, const Lane& lane) const {
#pragma unroll 1
    for (int which = WorkspaceLayout::kMeanK; which <= WorkspaceLayout::kX; ++which) {
      const bool value = which == WorkspaceLayout::kMeanV, x = which == WorkspaceLayout::kX;
      const int dim = value ? params.value_dim : params.dim;
      const Rows to = saved_rows(params.shape,
                                 value ? params.saved.mean_v
                                 : x   ? params.saved.x
                                       : params.saved.mean_k,
                                 dim);
      const RowStore store(to, dim, block, tiles().first_row, lane);
      Pair<float> scale;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = solve.status[r] == LLA_ROW_NAN ? NAN : x ? head.key : 1.0f / (value ? head.value : head.key);
      }
      const float4* const from = reinterpret_cast<const float4*>(this->section(which)) + lane.thread;
      const Pair<float> seen = {solve.omega[0] > 0 ? 1.0f : 0.0f, solve.omega[1] > 0 ? 1.0f : 0.0f};
      const bool shifted = head.shifted && which == WorkspaceLayout::kMeanK;
      constexpr int kTogether = 8;  // under way at once: every batch waits for memory
#pragma unroll 1
      for (int first = 0; first < kDim / 8; first += kTogether) {
        float4 v[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) v[i] = __ldcg(from + (first + i) * kWarpgroupThreads);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float2 c = shifted ? key_shift<kDim>(params, copy_index, first + i, lane) : make_float2(0, 0);
          store(first + i, make_float4(fmaf(v[i].x, scale[0], seen[0] * c.x), fmaf(v[i].y, scale[0], seen[0] * c.y),
                                       fmaf(v[i].z, scale[1], seen[1] * c.x), fmaf(v[i].w, scale[1], seen[1] * c.y)));
        }
      }
    }
  }

  // o = Σ U v / Σ U or, where the mean value is needed, (Σ U v - (Σ U - ω) mean_v) / ω; and everything else the caller
  // asked for.
  __device__ __forceinline__ void write_output(Vector& acc, const Pair<float>& sums, const Needs& needs) {
    const ForwardItem b = tiles().item;
    const Lane lane = Base::own_lane();
    const OwnRows own_rows(b.block, tiles().first_row, lane);
    const HeadScales head = tiles().head;
    // All that is read here is under way before any of it is used.
    Solve solve;
    Course course;
    SolveMemory::load(this->row_state(), solve, lane);
    SolveMemory::fetch_course(course, this->row_state(), lane);
    const float value = __uint_as_float(params.heads[b.copy_index].largest_value);
    Pair<float> total, excess, scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const OutputUnit unit = shared.output_units(warpgroup)[lane.row + 8 * r];
      const float expected = unit.one() * solve.omega[r];
      total[r] = unit.needs_mean_value() ? expected : fmaxf(sums[r], 0.5f * expected);
      excess[r] = unit.needs_mean_value() ? sums[r] - expected : 0.0f;
      scale[r] = solve.status[r] == LLA_ROW_NAN ? NAN : 1.0f / head.value;
    }
    if (needs.mean_value) {
      Vector mean;
      Fragment<kDim>::load(mean, this->section(WorkspaceLayout::kMeanV), lane.thread);
#pragma unroll
      for (int e = 0; e < kDim / 2; ++e) acc[e] = fmaf(-excess[row_of(e)], mean[e], acc[e]);
    }
    const Pair<float> inverse = {reciprocal(total[0]), reciprocal(total[1])};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      acc[e] = divide(acc[e], total[r], inverse[r]) * scale[r];
    }
    Pair<float> largest = {0, 0};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], fabsf(acc[e]));
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = quad_max(largest[r]);
    this->sync_warpgroup();  // x's low part has been read by all
    store_output<kDim>(params.o, acc, params.value_dim, b.block, tiles().first_row, lane,
                       shared.spare_operand(warpgroup));
    if (params.saved.x != nullptr) save_vectors(b.block, b.copy_index, head, solve, lane);
    if (lane.column != 0) return;
    Pair<KeyRange> keys;
    this->visible(keys, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!own_rows.exists[r]) continue;
      const int64_t index = row_index(params, b.block, own_rows.row[r]);
      if (params.info.iterations != nullptr) params.info.iterations[index] = solve.iterations[r];
      const float told = told_residual(solve, r, course.note[r], course.steps[r], course.size[r], course.along[r],
                                       head.key_norm, params.dim, keys[r].end - keys[r].begin);
      const float shown = shown_noise(course.along[r], course.note[r], largest[r], value);
      if (params.info.residual != nullptr) params.info.residual[index] = told;
      if (params.info.status != nullptr) {
        const bool outgrown = largest[r] >= least_infinite(params.o.dtype);
        params.info.status[index] = this->told_status(solve, r, outgrown ? INFINITY : fmaxf(told, shown));
      }
    }
  }
};

}  // namespace lla::cuda::sm90
