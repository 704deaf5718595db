// What every warpgroup does that solves its rows by conjugate gradients, in the forward and in the backward: its
// memory, what it tells the thread that copies for it, and the passes of the solve.
#pragma once

#include "cuda/sm90/solve/passes.cuh"
#include "cuda/tensor/rows_io.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Solver : Passes<Config> {
  using Base = Passes<Config>;
  using Base::warpgroup, Base::params, Base::parity, Base::rows, Base::shared, Base::feed, Base::tiles;
  using typename Base::DirectionWords;
  using typename Base::Parts;
  using typename Base::Vector;
  static constexpr int kDim = Config::kDim;

  uint32_t decisions = 0;  // published so far

  // This warpgroup's part of a vector in the resident block's scratch.
  __device__ __forceinline__ float* section(int which) const {
    return params.scratch + blockIdx.x * params.scratch_stride + which * (2 * Fragment<kDim>::kElements) +
           warpgroup * Fragment<kDim>::kElements;
  }
  __device__ __forceinline__ float4* row_state() const {
    return reinterpret_cast<float4*>(params.scratch + blockIdx.x * params.scratch_stride +
                                     WorkspaceLayout::kVectors * (2 * Fragment<kDim>::kElements) +
                                     warpgroup * (kWarpgroupRows * WorkspaceLayout::kRowState));
  }
  __device__ __forceinline__ void sync_warpgroup() const {
    named_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  }

  // With few tiles, which are fetched ahead, a warpgroup can end another pass before its last decision was seen. Two
  // decisions ahead, a barrier's parity would mean another one.
  __device__ __forceinline__ void wait_acknowledged() {
    if (decisions > 0) feed.acknowledged.wait((decisions - 1) & 1);
  }
  // Tells the producer whether this warpgroup needs another pass.
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
    return uniform(named_any(kWarpgroupBarrier + warpgroup, kWarpgroupThreads, own)) != 0;
  }
  __device__ __forceinline__ void tell(bool more) {
    if (threadIdx.x % kWarpgroupThreads == 0) feed.more[decisions & 1] = more;
    feed.decided.arrive_for_warpgroup();
    ++decisions;
  }

  __device__ __forceinline__ StepLimits step_limits() const {
    const bool few = tiles().few_keys;
    return {few ? params.few_keys_tolerance_squared : params.tolerance_squared, few ? params.few_keys_iterations : 0,
            params.max_iterations, params.share_squared, params.least_squared};
  }

  // A pass over the keys and one step of conjugate gradients.
  template <bool kBackward>
  __device__ __forceinline__ bool iterate(DirectionWords& direction, Direction& d, int live, bool two_parts) {
    const Lane lane = Base::own_lane();
    Vector acc;
    Pair<float> sums;
    const StepInputs<kDim> inputs{row_state(), reinterpret_cast<const uint4*>(section(WorkspaceLayout::kMeanHalf))};
    this->template weighted_pass<false>(
        acc, sums, direction, Parts::high, d, live, two_parts, [&] { inputs.prefetch(lane); },
        [&] { wait_acknowledged(); });
    const Vectors at{shared.residual[warpgroup], section(WorkspaceLayout::kX), section(WorkspaceLayout::kRidge),
                     params.ridge.per_dim};
    return step<kDim, kBackward>(inputs, acc, sums, direction, d, at, lane, tiles().head.key_norm, step_limits(),
                                 two_parts);
  }

  // Queries into shared memory.
  __device__ __forceinline__ void begin() {
    const Lane lane = Base::own_lane();
    load_queries<kDim>(shared.queries(warpgroup), shared.row_scales(warpgroup), params, tiles().item.block,
                       tiles().first_row, lane.thread);
    for (int word = lane.thread; word < Config::kLiveWords; word += kWarpgroupThreads) feed.live[parity].bits[word] = 0;
    fence_async_proxy();
    sync_warpgroup();
    const float key_scale = tiles().head.key;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowScale q_scale = shared.row_scales(warpgroup)[lane.row + 8 * r];
      rows.scale[r] = fmaxf(params.scale_log2 / q_scale.or_one() / key_scale, 1e-37f);
    }
  }

  __device__ __forceinline__ static float balance_of(float largest, float omega) {
    return omega > 0 ? fmaxf(fminf(largest, omega - largest), 0.0f) / omega : 0.0f;
  }

  // Known once every warp of the warpgroup has been through the first pass: after the first decision.
  __device__ __forceinline__ int live_tiles() const { return uniform(feed.live[parity].total(tiles().count)); }

  __device__ __forceinline__ bool few_keys() const { return uniform(tiles().few_keys) != 0; }

  // Conjugate gradients until no row goes on, which the producer is not told. `two_part_passes`: passes, from the
  // first, with U in two parts.
  template <bool kBackward>
  __device__ __forceinline__ void solve(DirectionWords& direction, Direction& d, int live, int two_part_passes) {
    for (int pass = 0; any(iterate<kBackward>(direction, d, live, pass < two_part_passes)); ++pass) tell(true);
  }

  __device__ __forceinline__ int told_status(const Solve& solve, int row, float told) const {
    return solve.status[row] == LLA_ROW_OK && told > params.most_told ? LLA_ROW_BREAKDOWN : solve.status[row];
  }

  // Whether there is another item; between items, lets the producer name the next but one.
  __device__ __forceinline__ bool begin_item(uint32_t turn) {
    parity = turn & 1;
    feed.item_full[parity].wait((turn >> 1) & 1);
    return uniform(feed.there[parity]);
  }
  __device__ __forceinline__ void end_item() {
    sync_warpgroup();
    feed.item_empty[parity].arrive_for_warpgroup();
  }
};

}  // namespace lla::cuda::sm90
