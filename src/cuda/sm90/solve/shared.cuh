// Shared memory of a forward block.
#pragma once

#include <cuda_fp16.h>

#include "cuda/sm90/solve/config.hpp"
#include "cuda/sm90/tiles.cuh"
#include "cuda/tensor/block.cuh"
#include "cuda/tensor/live_tiles.hpp"
#include "cuda/tensor/rows.cuh"
#include "cuda/tensor/weights.cuh"

namespace lla::cuda::sm90 {

// What a warpgroup needs to know of its item. Found once, by the producer, and kept here: divisions are slow, and
// a pass has no register to spare.
struct WarpgroupTiles {
  ForwardItem item;
  HeadScales head;
  int first_row;
  int first, count;  // tiles of the item
  TileRange clear;   // those without a key that one of its rows does not see, relative to the first
  int diagonal;      // first row + Lk - Lq
  int length_k;
  // No row sees more keys than tensor::few_keys: what rounding U once leaves behind of large first steps stays in x, so
  // their U is multiplied in two parts.
  bool few_keys;

  // In steps: the producer has few registers.
  template <class Config>
  __device__ __forceinline__ void describe(const ForwardParams& params, const ForwardItem& b) {
    constexpr int kKeys = Config::kKeys;
    item = b;
    first_row = b.block.first_row;
    first = b.tiles.begin;
    count = b.tiles.count();
    diagonal = first_row + b.block.length_k - b.block.length_q;
    length_k = b.block.length_k;
    keep_order();
    head = HeadScales(params, item.copy_index);
    keep_order();
    few_keys = most_keys(params.shape, visible_keys(params.shape, item.block, first_row, kWarpgroupRows)) <=
               tensor::few_keys(Config::kDim);
    keep_order();
    const KeyRange common = common_keys(params.shape, item.block, first_row, kWarpgroupRows);
    clear = {(common.begin + kKeys - 1) / kKeys - first, common.end / kKeys - first};
  }
};

// What goes between a warpgroup and the thread that copies for it: tiles, items and decisions.
template <class Config>
struct Feed {
  using ThreadWalk = LiveWalk<Config::kLiveWords, Alone>;
  using WarpWalk = LiveWalk<Config::kLiveWords, WarpTogether>;

  Ring<Config::kStages, kWarpgroupWarps> ring;
  Barrier item_full[2], item_empty[2];
  Barrier decided;                        // the warpgroup said whether it needs another pass
  Barrier acknowledged;                   // the producer has seen it
  WarpgroupTiles tiles[2];                // [item parity]
  bool there[2];                          // [item parity]: whether there is such an item
  int more[2];                            // [decision parity]
  LiveTiles<Config::kLiveWords> live[2];  // [item parity]

  __device__ __forceinline__ void init() {
    ring.init();
    for (int i = 0; i < 2; ++i) {
      item_full[i].init(1);
      item_empty[i].init(kWarpgroupArrivals);
    }
    decided.init(kWarpgroupArrivals);
    acknowledged.init(1);
  }
  __device__ __forceinline__ ThreadWalk thread_walk(int parity, int count) const { return {&live[parity], count}; }
  __device__ __forceinline__ WarpWalk warp_walk(int parity) const {
    return {&live[parity], uniform(tiles[parity].count)};
  }
};

// Columns of ones beside 16 keys of a tile, whatever the swizzle.
template <bool kPresent>
struct Ones {
  uint4 words[128];
  __device__ __forceinline__ void fill() {
    for (int i = threadIdx.x; i < 128; i += blockDim.x) words[i] = make_uint4(kOnePair, kOnePair, kOnePair, kOnePair);
    fence_async_proxy();
  }
};
template <>
struct Ones<false> {
  __device__ __forceinline__ void fill() {}
};

// What 1 is in units of U / W of a row's output pass, and whether that row needs its mean value.
struct OutputUnit {
  float word;  // negative: it does

  __device__ __forceinline__ static OutputUnit of(float one, bool needs_mean_value) {
    return {needs_mean_value ? -one : one};
  }
  __device__ __forceinline__ float one() const { return fabsf(word); }
  __device__ __forceinline__ bool needs_mean_value() const { return word < 0; }
};

template <class Config>
struct alignas(1024) ForwardShared {
  static constexpr int kOperand = kWarpgroupRows * Config::kDim;  // elements of a warpgroup's queries
  static constexpr int kWeightBytes = WeightCache<Config::kKeys>::kWarpgroupBytes;
  static constexpr int kPlaceBytes = Config::kCached ? Config::kWeightStages * kWeightBytes : kOperand * 2;
  static_assert(kPlaceBytes >= kOperand * 2);

  __half tiles[Config::kWarpgroups][Config::kStages][Config::kTileElements];
  // Fragment order. Before and after the solve: an operand (x's low part after it), then a scale for each row.
  float residual[Config::kWarpgroups][kOperand];
  // A warpgroup's queries. With cached weights no pass needs them once the weights are there, whose ring takes their
  // place.
  unsigned char place[Config::kWarpgroups][kPlaceBytes];
  Ones<Config::kOnes> ones;  // behind the tiles: their distance from one is not negative
  Feed<Config> feed[Config::kWarpgroups];
  Ring<Config::kCached ? Config::kWeightStages : 1, kWarpgroupWarps> weight_ring[Config::kWarpgroups];

  __device__ __forceinline__ __half* queries(int warpgroup) { return reinterpret_cast<__half*>(place[warpgroup]); }
  __device__ __forceinline__ uint4* weights(int warpgroup, int stage) {
    return reinterpret_cast<uint4*>(place[warpgroup] + stage * kWeightBytes);
  }
  // A 64-row fp16 tile where the residuals are while there is a solve.
  __device__ __forceinline__ __half* spare_operand(int warpgroup) {
    return reinterpret_cast<__half*>(residual[warpgroup]);
  }
  // Powers of two the rows of an operand were multiplied by, behind it; in the output pass what 1 is there.
  __device__ __forceinline__ RowScale* row_scales(int warpgroup) {
    return reinterpret_cast<RowScale*>(residual[warpgroup] + kOperand / 2);
  }
  __device__ __forceinline__ OutputUnit* output_units(int warpgroup) {
    return reinterpret_cast<OutputUnit*>(residual[warpgroup] + kOperand / 2);
  }
  __device__ __forceinline__ float* behind_scales(int warpgroup) {
    return residual[warpgroup] + kOperand / 2 + kWarpgroupRows;
  }

  // All threads of the block.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      for (auto& f : feed) f.init();
      for (auto& weights : weight_ring) weights.init();
      barrier_init_fence();
    }
    ones.fill();
    __syncthreads();
  }
};

}  // namespace lla::cuda::sm90
