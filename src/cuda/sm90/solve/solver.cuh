// What every warpgroup does that solves its rows by conjugate gradients, in the forward and in the backward: its memory,
// what it tells the thread that copies for it, and the passes of the solve.
#pragma once

#include "cuda/sm90/rows_io.cuh"
#include "cuda/sm90/solve/passes.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Solver : Passes<Config> {
  using Base = Passes<Config>;
  using Base::group, Base::p, Base::parity, Base::rows, Base::s, Base::t, Base::tiles;
  using typename Base::DirectionWords;
  using typename Base::Parts;
  using typename Base::Vector;
  static constexpr int kDim = Config::kDim;

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
    const bool more = any(active);
    tell(more);
    return more;
  }
  // Of all threads of the warpgroup, which the compiler must know: what it decides has products in it.
  __device__ __forceinline__ bool any(bool own) const {
    return uniform(named_any(kGroupBarrier + group, kWarpgroup, own)) != 0;
  }
  __device__ __forceinline__ void tell(bool more) {
    if (threadIdx.x % kWarpgroup == 0) t.more[decisions & 1] = more;
    t.decided.arrive_for_group();
    ++decisions;
  }

  __device__ __forceinline__ StepLimits limits() const {
    const bool few = tiles().few_keys;
    return {few ? p.few_keys_tolerance_squared : p.tolerance_squared, few ? p.few_keys_iterations : 0, p.max_iterations,
            p.part_squared, p.least_squared};
  }

  // A pass over the keys and one step of conjugate gradients.
  template <bool kBackward>
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
    return step<kDim, kBackward>(inputs, acc, sums, direction, d, at, lane, tiles().head.key_norm, limits(), split);
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

  __device__ __forceinline__ static float balance_of(float largest, float omega) {
    return omega > 0 ? fmaxf(fminf(largest, omega - largest), 0.0f) / omega : 0.0f;
  }

  // Known once every warp of the group has been through the first pass: after the first decision.
  __device__ __forceinline__ int live_tiles() const { return uniform(t.live[parity].total(tiles().count)); }

  __device__ __forceinline__ bool few_keys() const { return uniform(tiles().few_keys) != 0; }

  // Conjugate gradients until no row goes on, which the copying thread is not told. `split`: passes, from the first, with
  // U in two parts.
  template <bool kBackward>
  __device__ __forceinline__ void solve(DirectionWords& direction, Direction& d, int live, int split) {
    for (int pass = 0; any(iterate<kBackward>(direction, d, live, pass < split)); ++pass) tell(true);
  }

  __device__ __forceinline__ int told_status(const Solve& solve, int row, float told) const {
    return solve.status[row] == LLA_ROW_OK && told > p.most_told ? LLA_ROW_BREAKDOWN : solve.status[row];
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
