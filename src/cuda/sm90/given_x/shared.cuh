// Shared memory of a block that runs with x given.
#pragma once

#include <cuda_fp16.h>

#include "cuda/sm90/given_x/config.hpp"
#include "cuda/sm90/tiles.cuh"
#include "cuda/tensor/fragment.cuh"
#include "cuda/tensor/rows.cuh"

namespace lla::cuda::sm90 {

// What a warpgroup needs to know of its item. Kept here, not in registers: the pass has none to spare.
struct GivenXTiles {
  int last, count;    // tiles of the block are last, last - 1, ...
  int begin, end;     // those this warpgroup can see, counted from the last
  KeyRange unmasked;  // keys all its rows see
  int diagonal;       // first row + Lk - Lq
  int length_k;
};

template <class Config>
struct alignas(1024) GivenXShared {
  static constexpr int kParts = Config::kXTwoParts ? 2 : 1;
  __half keys[Config::kKeyStages][Config::kTileElements];
  __half values[Config::kValueStages][Config::kTileElements + Config::kOnesElements];
  __half q[Config::kWarpgroups][kWarpgroupRows * Config::kDim];
  __half x[Config::kWarpgroups][kParts][kWarpgroupRows * Config::kDim];
  Ring<Config::kKeyStages> key_ring;
  Ring<Config::kValueStages> value_ring;
  Barrier item_full[2], item_empty[2];
  int64_t item[2];
  GivenXTiles warpgroup_tiles[Config::kWarpgroups];
  RowScale q_scale[Config::kWarpgroups][kWarpgroupRows], x_scale[Config::kWarpgroups][kWarpgroupRows];

  // All threads of the block.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      key_ring.init();
      value_ring.init();
      for (int i = 0; i < 2; ++i) {
        item_full[i].init(1);
        item_empty[i].init(Config::kWarpgroups * kWarpgroupArrivals);
      }
      barrier_init_fence();
    }
    for (int stage = 0; stage < Config::kValueStages; ++stage) {
      uint32_t* const ones = reinterpret_cast<uint32_t*>(values[stage] + Config::kTileElements);
      for (int i = threadIdx.x; i < Config::kOnesElements / 2; i += Config::kThreads) ones[i] = kOnePair;
    }
    fence_async_proxy();
    __syncthreads();
  }
};

}  // namespace lla::cuda::sm90
