// Sizes of rows, and how a warp adds them to its head's bounds.
#pragma once

#include "cuda/tensor/backward/exponents.hpp"

namespace lla::cuda::tensor {

struct Size {
  int largest, norm;  // exponents above the largest element and the norm
};

// Notes a warp's maxima of HeadBounds, a lane for each. Maxima do not depend on their order: no matter who comes first.
__device__ __forceinline__ void raise_bounds(HeadBounds* head, const uint32_t (&most)[kHeadBounds]) {
  uint32_t own = 0;
#pragma unroll
  for (int f = 0; f < kHeadBounds; ++f) {
    const uint32_t m = __reduce_max_sync(0xffffffffu, most[f]);
    if (threadIdx.x % 32 == f) own = m;
  }
  uint32_t* const field = reinterpret_cast<uint32_t*>(head) + threadIdx.x % 32;
  // Most find a larger one there: reading first spares the cache the rest.
  if (own > 0 && own > __ldcg(field)) atomicMax(field, own);
}

}  // namespace lla::cuda::tensor
