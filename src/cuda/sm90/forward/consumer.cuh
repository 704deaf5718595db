// A multiplying warpgroup: 64 queries of a block through all passes over their keys.
//   1. means (scores, W K)                         -> ω, mean key; cached weights
//   2. conjugate gradients (scores, P Kᵀ, U K)     -> x; without the scores when weights are cached
//   3. mean value (scores, W V)                    -> if it is to be saved, or o needs it
//   4. output (scores, x Kᵀ high and low, U V)     -> o; without the low part where it cannot show
#pragma once

#include "cuda/sm90/forward/output_direction.cuh"
#include "cuda/sm90/forward/passes.cuh"
#include "cuda/sm90/forward/rows_io.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Consumer : Passes<Config> {
  using Base = Passes<Config>;
  using Base::group, Base::p, Base::parity, Base::rows, Base::s, Base::t, Base::tiles;
  using typename Base::DirectionWords;
  using typename Base::Parts;
  using typename Base::Vector;
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys;

  uint32_t decisions = 0;  // published so far

  // This warpgroup's part of a vector in the resident block's scratch.
  __device__ __forceinline__ float* section(int which) const {
    return p.scratch + blockIdx.x * p.scratch_stride + which * (2 * Fragment<kDim>::kElements) +
           group * Fragment<kDim>::kElements;
  }
  __device__ __forceinline__ float4* row_state() const {
    return reinterpret_cast<float4*>(p.scratch + blockIdx.x * p.scratch_stride +
                                     WorkspaceLayout::kVectors * (2 * Fragment<kDim>::kElements) +
                                     group * (kGroupRows * WorkspaceLayout::kRowState));
  }
  __device__ __forceinline__ void sync_group() const { named_sync(kGroupBarrier + group, kWarpgroup); }

  // With few tiles, which are fetched ahead, a warpgroup can end another pass before its last decision was seen. Two
  // decisions ahead, a barrier's parity would mean another one.
  __device__ __forceinline__ void wait_acknowledged() {
    if (decisions > 0) t.acknowledged.wait((decisions - 1) & 1);
  }
  // Tells the copying thread whether this warpgroup needs another pass.
  __device__ __forceinline__ bool publish(bool active) {
    wait_acknowledged();
    return decide(active);
  }
  __device__ __forceinline__ bool decide(bool active) {
    const bool more = uniform(named_any(kGroupBarrier + group, kWarpgroup, active));
    if (threadIdx.x % kWarpgroup == 0) t.more[decisions & 1] = more;
    t.decided.arrive_for_group();
    ++decisions;
    return more;
  }

  __device__ __forceinline__ StepLimits limits() const {
    return tiles().few_keys ? StepLimits{p.few_keys_tolerance_squared, p.few_keys_iterations, p.max_iterations}
                            : StepLimits{p.tolerance_squared, 0, p.max_iterations};
  }

  // A pass over the keys and one step of conjugate gradients. Returns whether a row of this warpgroup goes on.
  __device__ __forceinline__ bool iterate(DirectionWords& direction, Direction& d, int live, bool split) {
    const Lane lane = Base::own_lane();
    Vector acc;
    Pair<float> sums;
    const StepInputs<kDim> inputs{row_state(), reinterpret_cast<const uint4*>(section(WorkspaceLayout::kMeanHalf))};
    this->template weighted_pass<false>(acc, sums, direction, Parts::high, d, live, split, [&] {
      inputs.prefetch(lane);
      wait_acknowledged();
    });
    const Vectors at{s.residual[group], section(WorkspaceLayout::kX), section(WorkspaceLayout::kRidge),
                     p.ridge.per_dim};
    return decide(step<kDim>(inputs, acc, sums, direction, d, at, lane, tiles().head.key_norm, limits()));
  }

  __device__ __forceinline__ void sees_bad_keys(Pair<bool>& sees, int head_index, int64_t key_row,
                                                const Lane& lane) const {
    sees[0] = sees[1] = false;
    if (p.heads[head_index].bad_keys == 0) return;
    Pair<KeyRange> keys;
    this->visible(keys, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t bad = 0;
#pragma unroll 1
      for (int key = keys[r].begin + lane.column / 2; key < keys[r].end; key += 4) {
        bad |= p.bad_keys[key_row + key] | p.bad_values[key_row + key];
      }
      sees[r] = quad_max(bad ? 1.0f : 0.0f) != 0.0f;
    }
  }

  // Queries into shared memory.
  __device__ __forceinline__ void begin() {
    const Lane lane = Base::own_lane();
    load_queries<kDim>(s.queries(group), s.row_scales(group), p, tiles().item.block, tiles().first_row, lane.thread);
    for (int word = lane.thread; word < Config::kLiveWords; word += kWarpgroup) t.live[parity].bits[word] = 0;
    fence_async_proxy();
    sync_group();
    const float key_scale = tiles().head.key;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float q_scale = s.row_scales(group)[lane.row + 8 * r];
      rows.scale[r] = fmaxf(p.scale_log2 / (finite(q_scale) ? q_scale : 1.0f) / key_scale, 1e-37f);
    }
  }

  // The bound M of the logits is needed before any of them is known. No logit exceeds |q| max|k|; keys that do not
  // point along the query stay below half of it. A guess that turns out too low, or so high that weights would lose
  // bits, is corrected, and the pass repeated.
  __device__ __forceinline__ void guess_bounds() {
    const Lane lane = Base::own_lane();
    Pair<float> squares = {0, 0};
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const float2 q = unpack(tile_word<uint32_t>(s.queries(group), lane.tile_offset(i / 2, i & 1)));
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

  // ω and mean keys, and the tight bounds of the logits.
  __device__ __forceinline__ void find_means(Vector& mean, Pair<float>& omega, Pair<float>& bounds) {
    Pair<float> largest;
    do {
      this->means_pass(mean, omega, largest);
    } while (publish(correct_bounds(bounds, largest)));
    const Pair<float> inverse = {reciprocal(omega[0]), reciprocal(omega[1])};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      mean[e] = divide(mean[e], omega[r], inverse[r]);
    }
  }

  // Means, right-hand side, ridge and the first direction. Returns whether a row of this thread is to be solved.
  __device__ __forceinline__ bool prepare(DirectionWords& direction, Direction& d) {
    Solve solve;
    Vector mean;
    Pair<float> bounds;
    const Lane lane = Base::own_lane();
    find_means(mean, solve.omega, bounds);
    Fragment<kDim>::store(section(WorkspaceLayout::kMeanK), mean, lane.thread);

    const ForwardBlock b = tiles().item;
    const OwnRows own_rows(b.block, tiles().first_row, lane);
    const HeadScales head = tiles().head;
    Pair<bool> good, bad;
    sees_bad_keys(bad, b.head_index, b.key_row, lane);
    Pair<float> back;  // fp16 query -> query in units of the keys
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float q_scale = s.row_scales(group)[lane.row + 8 * r];
      good[r] = finite(q_scale) && !bad[r];
      back[r] = (p.negative_scale ? -head.key : head.key) / (finite(q_scale) ? q_scale : 1.0f);
      solve.ridge[r] = p.ridge.per_dim ? 0.0f : scaled_ridge(row_ridge(p.ridge, b.block, own_rows.row[r]), head.key);
      good[r] = good[r] && solve.ridge[r] >= 0;
    }
    Vector rhs;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const float2 q = unpack(tile_word<uint32_t>(s.queries(group), lane.tile_offset(i / 2, i & 1)));
      rhs[2 * i] = fmaf(q.x, back[i & 1], -mean[2 * i]);
      rhs[2 * i + 1] = fmaf(q.y, back[i & 1], -mean[2 * i + 1]);
    }
    if (p.ridge.per_dim) {
      load_ridge<kDim>(section(WorkspaceLayout::kRidge), rhs, mean, solve.ridge, good, p, b.block, own_rows.row,
                       head.key, lane);
    }
    Fragment<kDim>::store_half(reinterpret_cast<uint4*>(section(WorkspaceLayout::kMeanHalf)), mean, lane.thread);
    Pair<KeyRange> keys;
    Pair<bool> several;
    this->visible(keys, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      several[r] = keys[r].end - keys[r].begin > 1;  // one key is its own mean: o = v whatever x is
      solve.active[r] = good[r] && own_rows.exists[r] && several[r] && solve.omega[r] > 0 && solve.ridge[r] < INFINITY;
    }
    start_solve<kDim>(solve, rhs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      solve.status[r] = good[r] ? LLA_ROW_OK : LLA_ROW_NAN;
      if (several[r]) continue;
      solve.rr_start[r] = 0;  // nothing was left unsolved
      if (good[r] && solve.omega[r] > 0 && solve.ridge[r] == 0) solve.status[r] = LLA_ROW_BREAKDOWN;
    }
    if (p.saved.x != nullptr && lane.column == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!own_rows.exists[r]) continue;
        const int64_t index = row_index(p, b.block, own_rows.row[r]);
        const bool seen = solve.omega[r] > 0;
        const int loose = static_cast<int>(kWeightExponent - rows.shift[r] - bounds[r]);  // bits above the tight bound
        p.saved.max[index] = !good[r] ? NAN : seen ? bounds[r] : 0.0f;
        p.saved.omega[index] = !good[r] ? NAN : seen ? ldexpf(solve.omega[r] / kWeightScale, loose) : 0.0f;
      }
    }
    sync_group();  // the scales of the queries have been read by all
    Fragment<kDim>::store(s.residual[group], rhs, lane.thread);
    make_direction<kDim>(direction, rhs, mean, head.key_norm, solve, d);
    Fragment<kDim>::fill(section(WorkspaceLayout::kX), 0.0f, lane.thread);
    SolveMemory::store(row_state(), solve, lane);
    if constexpr (Config::kCached) fence_async_proxy_global();  // the copy engine will read the weights
    return solve.active[0] || solve.active[1];
  }

  __device__ __forceinline__ void run_item() {
    DirectionWords direction;
    Direction d;
    begin();
    guess_bounds();
    const bool more = publish(prepare(direction, d));
    const int live = live_tiles();
    solve(direction, d, live, more);
    const Needs needs = write_x(direction, d);
    if (publish(needs.mean_value)) {
      write_mean_value(direction, live);
      publish(false);
    }
    Vector acc;
    Pair<float> sums;
    this->template weighted_pass<true>(acc, sums, direction, needs.low_part ? Parts::both : Parts::high, d, live,
                                       few_keys());
    write_output(acc, sums, needs);
  }

  // Known once every warp of the group has been through the first pass: after the first decision.
  __device__ __forceinline__ int live_tiles() const { return uniform(t.live[parity].total(tiles().count)); }

  __device__ __forceinline__ bool few_keys() const { return uniform(tiles().few_keys) != 0; }

  __device__ __forceinline__ void solve(DirectionWords& direction, Direction& d, int live, bool more) {
    const int split = few_keys() ? p.split_passes : 0;
    for (int pass = 0; more; ++pass) more = iterate(direction, d, live, pass < split);
  }

  // Whether a row of this thread needs what rounding x to fp16 leaves over. All in units of the scaled keys; x·(q -
  // mean) is at least |q - mean|² over the largest curvature.
  __device__ __forceinline__ bool needs_low_part(const Vector& x, const Solve& solve) const {
    if (tiles().few_keys || p.ridge.per_dim) return true;
    Pair<float> squares = {0, 0};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) squares[row_of(e)] = fmaf(x[e], x[e], squares[row_of(e)]);
    bool low = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float square = quad_sum(squares[r]);
      const float least = p.low_parts.least(square, solve.curvature[r], solve.ridge[r] * square);
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
      needs[r] = !(0x1p-25f * steps * quad_sum(products[r]) <= p.sum_error);
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
    SolveMemory::load(row_state(), solve, lane);
    Fragment<kDim>::load(x, section(WorkspaceLayout::kX), lane.thread);
    Fragment<kDim>::load(mean, section(WorkspaceLayout::kMeanK), lane.thread);
    // All threads are then done with the residual, whose place takes x's low part.
    const bool low = uniform(named_any(kGroupBarrier + group, kWarpgroup, needs_low_part(x, solve)));
    Pair<float> one;
    make_output_direction<kDim>(direction, x, mean, s.spare_operand(group), low, lane, head, d, one);
    Pair<bool> value;
    needs_mean_value(value, x, mean);
    if (lane.column == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) s.row_scales(group)[lane.row + 8 * r] = value[r] ? -one[r] : one[r];
    }
    fence_async_proxy();
    const bool any = named_any(kGroupBarrier + group, kWarpgroup, p.saved.x != nullptr || value[0] || value[1]);
    return {low, uniform(any) != 0};
  }

  __device__ __forceinline__ void write_mean_value(const DirectionWords& direction, int live) {
    Vector mean;
    Pair<float> omega;
    this->template weighted_pass<true>(mean, omega, direction, Parts::none, {{0, 0}, {-1, -1}}, live, false);
    const Pair<float> inverse = {reciprocal(omega[0]), reciprocal(omega[1])};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) mean[e] = divide(mean[e], omega[row_of(e)], inverse[row_of(e)]);
    Fragment<kDim>::store(section(WorkspaceLayout::kMeanV), mean, Base::own_lane().thread);
  }

  // x, mean keys and mean values, which wait in the scratch memory.
  __device__ __forceinline__ void save_vectors(const Block& block, const HeadScales& head, const Solve& solve,
                                               const Lane& lane) const {
#pragma unroll 1
    for (int which = WorkspaceLayout::kMeanK; which <= WorkspaceLayout::kX; ++which) {
      const bool value = which == WorkspaceLayout::kMeanV, x = which == WorkspaceLayout::kX;
      const int dim = value ? p.value_dim : p.dim;
      const Rows to = saved_rows(value ? p.saved.mean_v : x ? p.saved.x : p.saved.mean_k, dim, p);
      const RowStore store(to, dim, block, tiles().first_row, lane);
      Pair<float> scale;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = solve.status[r] == LLA_ROW_NAN ? NAN : x ? head.key : 1.0f / (value ? head.value : head.key);
      }
      const float4* const from = reinterpret_cast<const float4*>(section(which)) + lane.thread;
#pragma unroll 4
      for (int i = 0; i < kDim / 8; ++i) {
        const float4 v = __ldcg(from + i * kWarpgroup);
        store(i, make_float4(v.x * scale[0], v.y * scale[0], v.z * scale[1], v.w * scale[1]));
      }
    }
  }

  // o = Σ U v / Σ U or, where the mean value is needed, (Σ U v - (Σ U - ω) mean_v) / ω; and everything else the caller
  // asked for.
  __device__ __forceinline__ void write_output(Vector& acc, const Pair<float>& sums, const Needs& needs) {
    const ForwardBlock b = tiles().item;
    const Lane lane = Base::own_lane();
    const OwnRows own_rows(b.block, tiles().first_row, lane);
    const HeadScales head = tiles().head;
    Solve solve;
    SolveMemory::load(row_state(), solve, lane);
    Pair<float> total, excess, scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float one = s.row_scales(group)[lane.row + 8 * r], expected = fabsf(one) * solve.omega[r];
      total[r] = one < 0 ? expected : fmaxf(sums[r], 0.5f * expected);
      excess[r] = one < 0 ? sums[r] - expected : 0.0f;
      scale[r] = solve.status[r] == LLA_ROW_NAN ? NAN : 1.0f / head.value;
    }
    if (needs.mean_value) {
      Vector mean;
      Fragment<kDim>::load(mean, section(WorkspaceLayout::kMeanV), lane.thread);
#pragma unroll
      for (int e = 0; e < kDim / 2; ++e) acc[e] = fmaf(-excess[row_of(e)], mean[e], acc[e]);
    }
    const Pair<float> inverse = {reciprocal(total[0]), reciprocal(total[1])};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      acc[e] = divide(acc[e], total[r], inverse[r]) * scale[r];
    }
    sync_group();  // x's low part has been read by all
    store_output<kDim>(p.o, acc, p.value_dim, b.block, tiles().first_row, lane, s.spare_operand(group));
    if (p.saved.x != nullptr) save_vectors(b.block, head, solve, lane);
    if (lane.column != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!own_rows.exists[r]) continue;
      const int64_t index = row_index(p, b.block, own_rows.row[r]);
      if (p.info.iterations != nullptr) p.info.iterations[index] = solve.iterations[r];
      if (p.info.residual != nullptr) {
        p.info.residual[index] = solve.rr_start[r] > 0 ? sqrtf(solve.rr[r] / solve.rr_start[r]) : 0.0f;
      }
      if (p.info.status != nullptr) p.info.status[index] = solve.status[r];
    }
  }

  // Whether there is another item; between items, lets the producer name the next but one.
  __device__ __forceinline__ bool begin_item(uint32_t turn) {
    parity = turn & 1;
    t.item_full[parity].wait((turn >> 1) & 1);
    return uniform(t.there[parity]);
  }
  __device__ __forceinline__ void end_item() {
    sync_group();
    t.item_empty[parity].arrive_for_group();
  }
};

}  // namespace lla::cuda::sm90
