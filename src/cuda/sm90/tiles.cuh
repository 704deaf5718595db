// The rings between producers and consumer warpgroups: of key and value tiles, and of cached weights.
//
// Both sides go through a ring in the same order, so what comes next needs no name: a slot is a stage and the parity of
// its phase. Passes of the solve begin with K0 K1, and so does the output pass after them (K0 K1 V0 K2 V1 ... V(n-1)):
// the producer may fetch these two before it knows whether the solve goes on.
#pragma once

#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90 {

inline constexpr int kWarpgroupWarps = 4, kConsumerWarps = 8;
inline constexpr int kTilesAhead = 2;  // K0 K1

template <int kStages, int kReaders = kConsumerWarps>
struct Ring {
  Barrier full[kStages], empty[kStages];

  struct Slot {
    uint32_t stage = 0, parity = 0;

    // This slot; moves on to the next.
    __device__ __forceinline__ Slot take() {
      const Slot mine = *this;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      parity ^= stage == 0;
      return mine;
    }
  };
  __device__ __forceinline__ void wait(const Slot& s) { full[s.stage].wait(s.parity); }
  // `read`: see Barrier::arrive_for_warp.
  __device__ __forceinline__ void release(const Slot& s, uint32_t read = 0) { empty[s.stage].arrive_for_warp(read); }
  __device__ __forceinline__ Barrier& acquire(const Slot& s, uint32_t bytes) {
    empty[s.stage].wait(s.parity ^ 1);
    full[s.stage].arrive_expecting(bytes);
    return full[s.stage];
  }

  // The same with counted positions. They stay below 2^32: beyond, those of a ring whose size is no power of two would
  // skip a stage.
  __device__ __forceinline__ static int stage(uint32_t position) { return position % kStages; }
  __device__ __forceinline__ static uint32_t parity(uint32_t position) { return (position / kStages) & 1; }

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kReaders * kWarpArrivals);
    }
  }
  // Consumers.
  __device__ __forceinline__ void wait(uint32_t position) { full[stage(position)].wait(parity(position)); }
  __device__ __forceinline__ void release(uint32_t position) { empty[stage(position)].arrive_for_warp(); }
  // Producer: the barrier to load into, once the stage is free.
  __device__ __forceinline__ Barrier& acquire(uint32_t position, uint32_t bytes) {
    empty[stage(position)].wait(parity(position) ^ 1);
    Barrier& barrier = full[stage(position)];
    barrier.arrive_expecting(bytes);
    return barrier;
  }
};

}  // namespace lla::cuda::sm90
