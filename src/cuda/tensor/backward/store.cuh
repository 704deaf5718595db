// Writing accumulator fragments to gradient rows of any dtype and stride.
#pragma once

#include "cuda/tensor/backward/exponents.hpp"
#include "cuda/tensor/rows.cuh"

namespace lla::cuda::tensor {

// The thread's share of row h (0 or 1) of an accumulator, times `scale`; nothing if the tensor is not wanted.
template <int kDim>
__device__ __forceinline__ void store_row(const Rows& rows, int64_t batch, int64_t position, int64_t head, int dim,
                                          int column, const float (&values)[kDim / 2], int h, const PowerOfTwo& scale) {
  if (rows.data == nullptr) return;
  void* const row = const_cast<void*>(row_pointer(rows, batch, position, head));
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    if (8 * j + column < dim) {
      store_pair(rows, row, 8 * j + column, scale * values[4 * j + 2 * h], scale * values[4 * j + 2 * h + 1]);
    }
  }
}

}  // namespace lla::cuda::tensor
