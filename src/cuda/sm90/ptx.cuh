// The Hopper instructions CUDA C++ has no name for: transaction barriers, the copy engine, fences, what stands around
// warpgroup products, moving registers. All other PTX is in tensor/ptx.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tensor/ptx.cuh"

namespace lla::cuda::sm90 {

// How often a barrier is arrived at for a warp, or a warpgroup, whose threads have synchronised: once.
// compute-sanitizer's racecheck follows an arrival for the arriving thread only, not for those it has synchronised with
// before; for that tool there is a build (LLA_RACECHECK) in which every thread arrives for itself.
#ifdef LLA_RACECHECK
inline constexpr int kWarpArrivals = 32, kWarpgroupArrivals = 128;
#else
inline constexpr int kWarpArrivals = 1, kWarpgroupArrivals = 1;
#endif

// What L2 makes of bytes that the copy engine brings, as createpolicy.fractional makes it: evict_first, evict_normal.
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictNormal = 0x1000000000000000;

// One phase of an mbarrier ends when `count` arrivals and all announced bytes are in. Waiters name the phase's parity.
struct Barrier {
  uint64_t word;

  __device__ __forceinline__ void init(uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(count) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
  }
  // By all threads of a warp: kWarpArrivals. Without a branch: warps that multiply next must not split.
  //
  // An arrival does not wait for loads issued before it, and behind products that read shared memory at its full rate
  // a load may come so late that the copy engine has filled the slot again. Where the words read are not used before
  // the arrival, it has to look at them (`read`: anything made of all of them that is never ~0).
  __device__ __forceinline__ void arrive_for_warp(uint32_t read = 0) {
    const bool chosen = threadIdx.x % (32 / kWarpArrivals) == 0 && read != ~0u;
    asm volatile(
        "{\n"
        ".reg .pred chosen;\n"
        "setp.ne.u32 chosen, %1, 0;\n"
        "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(shared_address(&word)),
        "r"(static_cast<uint32_t>(chosen))
        : "memory");
  }
  // By all threads of a warpgroup: kWarpgroupArrivals.
  __device__ __forceinline__ void arrive_for_warpgroup() {
    if (threadIdx.x % (128 / kWarpgroupArrivals) == 0) arrive();
  }
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
  }
  // Arrives, later, when all that this thread has asked for with copy_ahead is there.
  __device__ __forceinline__ void arrive_when_copied() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&word)) : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(shared_address(&word)),
        "r"(parity)
        : "memory");
  }
};

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One thread of a warp, all of whose threads ask. What depends on a thread's number could be true of several, for all
// the assembler knows: operands of a copy, which it wants in uniform registers, then go there in a loop over threads.
__device__ __forceinline__ bool elected() {
  uint32_t mine;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(mine));
  return mine != 0;
}

// A box of the tensor at (column, row) into shared memory; its bytes count towards `barrier`.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, int column, int row, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(&barrier.word)), "r"(column), "r"(row)
      : "memory");
}

// The same of four dimensions. `policy`: kEvictFirst for what nobody reads again.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, int column, int head, int slot, int page,
                                         Barrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(shared_address(&barrier.word)), "r"(column), "r"(head), "r"(slot), "r"(page), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, int column, int head, int slot, int page,
                                         Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(shared_address(&barrier.word)), "r"(column), "r"(head), "r"(slot), "r"(page)
      : "memory");
}

// A plain run of bytes, that are read once in a while and should not push others out of L2. Both addresses and `bytes`
// are multiples of 16; the bytes count towards `barrier`.
__device__ __forceinline__ void load_bytes_once(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier.word)), "l"(kEvictFirst)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes this thread's ordinary shared-memory stores visible to wgmma and the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for stores to global memory that the copy engine will read.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Around warpgroup products (mma.cuh): before the first of a batch, behind its last, and until all but the last kPending
// batches have ended.
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler does not know that a product in flight writes its registers: this pins them where it stands.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace lla::cuda::sm90
