// The instructions CUDA C++ has no name for that need no warpgroups and no copy engine. No kernel has PTX of its own:
// here and in sm90/ptx.cuh is all there is, and tests/emulated_gpu has another meaning for these names, in which kernels
// run on a CPU. (What lets kernels overlap, griddepcontrol, stmatrix and additions of four numbers to global memory need
// compute capability 9.0.)
#pragma once

#include <cstdint>

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::tensor {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global into shared memory, while this thread goes on; zeros where there is nothing to copy.
__device__ __forceinline__ void copy_ahead(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
// Until this thread can read all it asked for.
__device__ __forceinline__ void wait_copied_ahead() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// All it has asked for since the last group was ended is one; until all but the last kPending groups are there.
__device__ __forceinline__ void end_group_ahead() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_groups_ahead() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The named barriers of a block. 0 is __syncthreads; no kernel uses two of the others that overlap.
enum NamedBarrier : int {
  kWarpgroupBarrier = 1,  // + consumer warpgroup: its 128 threads
  kConverterBarrier = 1,  // decode: the warps that convert keys and values
  kPublishedBarrier = 1,  // decode's factorisation: a panel is there for the rows
  kEliminatedBarrier = 2  // and back for the tiles
};
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Its other half, for those who need not wait.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// A named barrier that also says whether any thread brought `mine`.
__device__ __forceinline__ bool named_any(int id, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred in, out;\n"
      "setp.ne.u32 in, %3, 0;\n"
      "bar.red.or.pred out, %1, %2, in;\n"
      "selp.u32 %0, 1, 0, out;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return any != 0;
}

// Of kernels launched early (launch_early): all before it in the stream has ended, and its results are there.
__device__ __forceinline__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// From when all blocks have said so, the next kernel may begin if it was launched early.
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

// threadIdx.x where it is needed after a loop: what is made of it does not take the loop's registers.
__device__ __forceinline__ int thread_read_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Approximations, to an ulp or two.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two fp16 numbers in a word, for those whose bound holds for solved rows only: what is finite stays finite.
__device__ __forceinline__ uint32_t pack_saturated(float a, float b) {
  uint32_t word;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}
// Two numbers of bf16 in a word.
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t times_plus(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Memory accesses stay on their side of this: without it the compiler hoists the loads of a whole unrolled loop and
// runs out of registers.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }
// Keeps what is made of x beside its use: a few instructions cost less than the registers that would hold them all.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
// A branch with this in it is not merged with the other.
__device__ __forceinline__ void keep_branch() { asm volatile("// a branch of its own"); }
__device__ __forceinline__ void exit_thread() { asm volatile("exit;"); }

// Has what lies there brought to L1: a load nobody waits for.
__device__ __forceinline__ void touch(const void* there) {
  asm volatile(
      "{\n"
      ".reg .b32 nobody;\n"
      "ld.global.b32 nobody, [%0];\n"
      "}\n" ::"l"(there));
}
__device__ __forceinline__ void prefetch_to_l2(const void* there) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(there));
}

// Four numbers of one thread, added by L2 while it goes on; nobody else touches them.
__device__ __forceinline__ void add_four(float4* at, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_four(float4* at, float4 v) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Four 8 x 8 matrices, of whose rows every lane names one: a thread has columns 2t, 2t + 1 of row g of each (g = lane / 4,
// t = lane % 4).
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
// The same transposed: a thread gets rows 2t, 2t + 1 of column g of each.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// C += A B by a warp: 16 x 16 times 16 x 8.
template <bool kBf16>
__device__ __forceinline__ void warp_product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
// The same of TF32: 16 x 8 times 8 x 8.
__device__ __forceinline__ void warp_product_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace lla::cuda::tensor
