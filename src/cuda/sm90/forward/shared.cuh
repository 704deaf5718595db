// Shared memory of a forward block.
#pragma once

#include <cuda_fp16.h>

#include "cuda/sm90/forward/config.hpp"
#include "cuda/sm90/tiles.cuh"

namespace lla::cuda::sm90 {

// What a warpgroup's passes need to know of its item. Kept here, not in registers: a pass has none to spare.
struct GroupTiles {
  int first, count;   // tiles of the block
  TileRange own;      // those this warpgroup can see, relative to the first
  KeyRange unmasked;  // keys all its rows see
  int diagonal;       // first row + Lk - Lq
  int length_k;
  float key_scale, key_norm;  // HeadScales
};

template <class Config>
struct alignas(1024) ForwardShared {
  __half tiles[Config::kStages][Config::kTileElements];
  __half q[Config::kGroups][kGroupRows * Config::kDim];
  __half p[Config::kGroups][kGroupRows * Config::kDim];        // direction; x (high part) in the output pass
  float residual[Config::kGroups][kGroupRows * Config::kDim];  // fragment order; x (low part) in the output pass
  Ring<Config::kStages> ring;
  Barrier item_full[2], item_empty[2];
  Barrier decided;  // both warpgroups said whether they need another pass
  int64_t item[2];
  int more[2][2];  // [decision parity][warpgroup]
  GroupTiles group_tiles[Config::kGroups];
  LiveTiles<Config::kLiveWords> live[2];  // [item parity]
  float q_scale[Config::kGroups][kGroupRows];  // NaN for a row with a non-finite element

  // All threads of the block.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
      ring.init();
      for (int i = 0; i < 2; ++i) {
        item_full[i].init(1);
        item_empty[i].init(Config::kGroups);
      }
      decided.init(Config::kGroups);
      barrier_init_fence();
    }
    __syncthreads();
  }
};

// Named barriers of a block.
inline constexpr int kGroupBarrier = 1;  // + warpgroup: its 128 threads

}  // namespace lla::cuda::sm90
