// The rings between the copying thread and the two multiplying warpgroups: of key and value tiles, which both read, and
// of cached weights, where each has its own.
//
// Both sides go through a ring in the same order, so what comes next needs no name: a slot is a stage and the parity of
// its phase. Passes of the solve begin with K0 K1, and so does the output pass after them (K0 K1 V0 K2 V1 ... V(n-1)):
// the producer may fetch these two before it knows whether the solve goes on.
#pragma once

#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/schedule.hpp"

namespace lla::cuda::sm90 {

inline constexpr int kGroupWarps = 4, kConsumerWarps = 8;
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
  __device__ __forceinline__ void release(const Slot& s) { empty[s.stage].arrive_if(threadIdx.x % 32 == 0); }
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
      empty[i].init(kReaders);
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

// Which tiles of an item have a non-zero weight, a bit per tile and warpgroup. A tile without one adds exactly nothing
// to any sum, so passes after the first skip it. Of tiles beyond the bits a warpgroup takes all it can see.
template <int kWords, int kMembers>
struct LiveTiles {
  uint32_t bits[kMembers][kWords];

  __device__ __forceinline__ uint32_t word(int group, int index, TileRange visible) const {
    return index < kWords ? bits[group][index]
                          : bits_below(visible.end - 32 * index) & ~bits_below(visible.begin - 32 * index);
  }
  __device__ __forceinline__ int total(int count) const {
    int live = 0;
    for (int word = 0; word < kWords && word * 32 < count; ++word)
      live += __popc(bits[0][word] | bits[kMembers - 1][word]);
    return live + max(0, count - kWords * 32);
  }

 private:
  __device__ __forceinline__ static uint32_t bits_below(int n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; }
};

// Tells the compiler that all threads of a warp hold the same value: what depends on it can stay in uniform registers,
// where the tensor cores want their descriptors.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ TileRange uniform(TileRange r) { return {uniform(r.begin), uniform(r.end)}; }

// Steps through the tiles that are live for a warpgroup, 32 of them in registers at a time. kWarp: whole warps walk
// together (the copying thread walks alone).
template <int kWords, int kMembers, bool kWarp>
struct LiveWalk {
  const LiveTiles<kWords, kMembers>* map;
  TileRange visible[kMembers];  // of each warpgroup
  int count;                    // tiles of the item
  int tile = -1;
  uint32_t bits[kMembers] = {};

  // To the next live tile. Past the last one, `tile` is of no use.
  __device__ __forceinline__ void advance() {
    ++tile;
    while (tile < count) {
      if ((tile & 31) == 0) load();
      const uint32_t rest = (bits[0] | bits[kMembers - 1]) >> (tile & 31);
      if (rest != 0) {
        tile += __ffs(rest) - 1;
        return;
      }
      tile = (tile | 31) + 1;
    }
  }
  // How many tiles from this one on a member takes without a gap; the walk moves to the last of them.
  __device__ __forceinline__ int run(int member) {
    const int first = tile;
    while (true) {
      const uint32_t gaps = ~bits[member] >> (tile & 31);
      if (gaps != 0) {
        tile += __ffs(gaps) - 2;
        break;
      }
      tile |= 31;
      if (tile + 1 >= count) break;
      ++tile;
      load();
      if ((bits[member] & 1) == 0) {
        --tile;
        break;
      }
    }
    return min(tile, count - 1) - first + 1;
  }
  __device__ __forceinline__ bool takes(int member) const { return (bits[member] >> (tile & 31)) & 1; }

 private:
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int g = 0; g < kMembers; ++g) {
      bits[g] = map->word(g, tile >> 5, visible[g]);
      if constexpr (kWarp) bits[g] = uniform(bits[g]);
    }
  }
};

}  // namespace lla::cuda::sm90
