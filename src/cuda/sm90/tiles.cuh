// The ring of key and value tiles between the copying warp and the two multiplying warpgroups.
//
// A pass over the keys is a sequence of positions; both sides count them, so a position names its stage and parity.
// Passes that need values order their tiles K0 K1 V0 K2 V1 ... V(n-1): a pass of either kind begins with K0 K1, which the
// producer may therefore fetch before it knows whether the solve goes on.
#pragma once

#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/schedule.hpp"

namespace lla::cuda::sm90 {

inline constexpr int kConsumerWarps = 8;
inline constexpr int kTilesAhead = 2;  // every pass begins with K0 K1

// Positions stay below 2^32: beyond, those of a ring whose size is no power of two would skip a stage.
template <int kStages>
struct Ring {
  Barrier full[kStages], empty[kStages];

  __device__ __forceinline__ static int stage(uint32_t position) { return position % kStages; }
  __device__ __forceinline__ static uint32_t parity(uint32_t position) { return (position / kStages) & 1; }

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kConsumerWarps);
    }
  }
  // Consumers.
  __device__ __forceinline__ void wait(uint32_t position) { full[stage(position)].wait(parity(position)); }
  __device__ __forceinline__ void release(uint32_t position) {
    empty[stage(position)].arrive_if(threadIdx.x % 32 == 0);
  }
  // Producer: the barrier to load into, once the stage is free.
  __device__ __forceinline__ Barrier& acquire(uint32_t position, uint32_t bytes) {
    empty[stage(position)].wait(parity(position) ^ 1);
    Barrier& barrier = full[stage(position)];
    barrier.arrive_expecting(bytes);
    return barrier;
  }
};

// Positions of the i-th tile of a pass of `count` tiles that starts at `base`.
struct PassOrder {
  uint32_t base;
  int count;
  bool values;

  __device__ __forceinline__ uint32_t key(int i) const { return base + (values && i > 0 ? 2 * i - 1 : i); }
  __device__ __forceinline__ uint32_t value(int i) const { return base + (i == count - 1 ? 2 * i + 1 : 2 * i + 2); }
  __device__ __forceinline__ uint32_t end() const { return base + (values ? 2 * count : count); }
};

// Which tiles of a block have a non-zero weight, a bit per tile and warpgroup. A tile without one adds exactly nothing to any
// sum, so passes after the first skip it. Tiles beyond the bits count as live.
template <int kWords>
struct LiveTiles {
  uint32_t bits[2][kWords];

  __device__ __forceinline__ bool group(int g, int tile) const {
    return tile >= kWords * 32 || ((bits[g][tile / 32] >> (tile % 32)) & 1);
  }
  __device__ __forceinline__ bool any(int tile) const { return group(0, tile) || group(1, tile); }
  __device__ __forceinline__ int next(int tile, int count) const {  // the first live tile from `tile` on
    while (tile < count && !any(tile)) ++tile;
    return tile;
  }
  __device__ __forceinline__ int total(int count) const {
    int live = 0;
    for (int word = 0; word < kWords && word * 32 < count; ++word) live += __popc(bits[0][word] | bits[1][word]);
    return live + max(0, count - kWords * 32);
  }
};

}  // namespace lla::cuda::sm90
