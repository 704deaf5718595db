// What the blocks of the row and the key pass have in common: a producer thread, two consumer warpgroups,
// operands that stay and a ring of slots for tiles of 64 rows.
#pragma once

#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/cg.cuh"
#include "cuda/tensor/fragment.cuh"

namespace lla::cuda::sm90 {

inline constexpr int kPassWarpgroups = 2;  // consumer warpgroups
inline constexpr int kPassThreads = (kPassWarpgroups + 1) * kWarpgroupThreads;
inline constexpr int kPassProducerRegisters = 24, kPassConsumerRegisters = 240;

template <int kSlots>
struct PassBarriers {
  Barrier resident;  // the operands that stay are there
  Barrier full[kSlots];
  Barrier empty[kSlots];

  __device__ __forceinline__ void init() {
    resident.init(1);
    for (int i = 0; i < kSlots; ++i) {
      full[i].init(1);
      empty[i].init(kPassWarpgroups * kWarpgroupWarps * kWarpArrivals);
    }
    barrier_init_fence();
  }
};

// A position in the ring of slots.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(int by) {
    slot += by;
    if (slot >= kSlots) slot -= kSlots, phase ^= 1;
  }
  __device__ __forceinline__ RingPosition ahead(int by) const {
    RingPosition r = *this;
    r.advance(by);
    return r;
  }
};

template <int kDim>
__device__ __forceinline__ void load_tile(__half* to, const CUtensorMap* map, int64_t row, Barrier& barrier) {
#pragma unroll
  for (int c = 0; c < kDim / 64; ++c) load_box(to + c * (64 * 64), map, c * 64, static_cast<int>(row), barrier);
}

// 64 rows as the left operand of a product: a tile, or its words in registers.
template <int kDim, bool kInRegisters>
struct LeftOperand {
  const __half* words;
  __device__ __forceinline__ LeftOperand(__half* tile, const Lane&) : words(tile) {}
};
template <int kDim>
struct LeftOperand<kDim, true> {
  uint32_t words[kDim / 4];
  __device__ __forceinline__ LeftOperand(__half* tile, const Lane& lane) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) words[i] = tile_word<uint32_t>(tile, lane.tile_offset(i / 2, i & 1));
    pin(words);
  }
};

// All threads of a block: `copy` in one of them, `multiply(warpgroup)` in the warpgroups.
template <int kSlots, class Copy, class Multiply>
__device__ __forceinline__ void run_pass_block(PassBarriers<kSlots>& barriers, const Copy& copy,
                                               const Multiply& multiply) {
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / kWarpgroupThreads);
  if (warpgroup == 0) {
    give_registers<kPassProducerRegisters>();
    if (threadIdx.x == 0) copy();
  } else {
    take_registers<kPassConsumerRegisters>();
    multiply(warpgroup - 1);
  }
}

}  // namespace lla::cuda::sm90
