// The few instructions CUDA C++ has no name for that need no Hopper: addresses, copies ahead, named barriers. (What
// lets kernels overlap, griddepcontrol, needs compute capability 9.0; stmatrix in rows_io.cuh does, too.)
#pragma once

#include <cstdint>

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

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace lla::cuda::tensor
