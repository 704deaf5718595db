// Sizes of rows, and how a warp adds them to its head's bounds.
#pragma once

#include "cuda/sm90/backward/exponents.hpp"

namespace lla::cuda::sm90 {

struct Size {
  int largest, norm;  // exponents above the largest element and the norm
};

// Notes a warp's maxima of HeadBounds. Maxima do not depend on their order: no matter who comes first.
__device__ __forceinline__ void raise_bounds(HeadBounds* head, const uint32_t (&most)[kHeadBounds]) {
#pragma unroll
  for (int f = 0; f < kHeadBounds; ++f) {
    const uint32_t m = __reduce_max_sync(0xffffffffu, most[f]);
    if (threadIdx.x % 32 == 0 && m > 0) atomicMax(reinterpret_cast<uint32_t*>(head) + f, m);
  }
}

}  // namespace lla::cuda::sm90
