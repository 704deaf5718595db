// What stands for src/cuda/sm90/ptx.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tensor/ptx.cuh"

namespace lla::cuda::sm90 {

inline constexpr int kWarpArrivals = 1, kWarpgroupArrivals = 1;
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictNormal = 0x1000000000000000;

struct Barrier {
  uint64_t word;

  void init(uint32_t count) { emulated::init(own(), count); }
  void arrive() { emulated::arrive(own()); }
  void arrive_for_warp(uint32_t read = 0) {
    if (threadIdx.x % 32 == 0 && read != ~0u) arrive();
  }
  void arrive_for_warpgroup() {
    if (threadIdx.x % 128 == 0) arrive();
  }
  void arrive_expecting(uint32_t bytes) { emulated::arrive(own(), bytes); }
  void arrive_when_copied() { emulated::arrive_when_copied(own()); }
  void wait(uint32_t parity) { emulated::wait(own(), parity); }
  emulated::TransactionBarrier& own() { return reinterpret_cast<emulated::TransactionBarrier&>(word); }
};

inline void barrier_init_fence() {}
inline bool elected() {
  emulated::together("elect.sync", nullptr, [](void* const*) {});
  return threadIdx.x % 32 == 0;
}

inline const emulated::Map& map_of(const CUtensorMap* map) { return *reinterpret_cast<const emulated::Map*>(map); }
inline void load_box(void* to, const CUtensorMap* map, int column, int row, Barrier& barrier) {
  emulated::load_box(shared_address(to), map_of(map), {column, row, 0, 0}, barrier.own());
}
inline void load_box(uint32_t to, const CUtensorMap* map, int column, int head, int slot, int page, Barrier& barrier,
                     uint64_t = kEvictNormal) {
  emulated::load_box(to, map_of(map), {column, head, slot, page}, barrier.own());
}
inline void load_bytes_once(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0 || shared_address(to) % 16 != 0) {
    emulated::fail("a copy of bytes that are not aligned");
  }
  emulated::land_later([=, &barrier] {
    std::memcpy(to, from, bytes);
    emulated::complete(barrier.own(), bytes);
  });
}
inline void prefetch_map(const CUtensorMap*) {}
inline void fence_async_proxy() {}
inline void fence_async_proxy_global() {}

inline void products_fence() {}
inline void mma_commit() { emulated::commit_products(); }
template <int kPending>
void mma_wait() {
  emulated::wait_products(kPending);
}
template <class T, int kCount>
void pin(T (&)[kCount]) {}

template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

}  // namespace lla::cuda::sm90
