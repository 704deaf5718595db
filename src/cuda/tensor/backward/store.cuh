// Writing accumulator fragments to gradient rows of any dtype and stride.
#pragma once

#include "cuda/tensor/backward/exponents.hpp"
#include "cuda/tensor/rows.cuh"

namespace lla::cuda::tensor {

// Columns (column, column + 1) of a row of `rows`.
__device__ __forceinline__ void store_pair(void* row, const Rows& rows, int column, float x, float y) {
  if (rows.dtype == DType::f32) {
    float* to = static_cast<float*>(row) + column * rows.channel;
    if (rows.vectors) {
      *reinterpret_cast<float2*>(to) = make_float2(x, y);
    } else {
      to[0] = x, to[rows.channel] = y;
    }
    return;
  }
  uint32_t word;
  if (rows.dtype == DType::bf16) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    word = *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __half2 v = __floats2half2_rn(x, y);
    word = *reinterpret_cast<const uint32_t*>(&v);
  }
  uint16_t* to = static_cast<uint16_t*>(row) + column * rows.channel;
  if (rows.vectors) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
    to[0] = static_cast<uint16_t>(word), to[rows.channel] = static_cast<uint16_t>(word >> 16);
  }
}

// The thread's share of row h (0 or 1) of an accumulator, times `scale`; nothing if the tensor is not wanted.
template <int kDim>
__device__ __forceinline__ void store_row(const Rows& rows, int64_t batch, int64_t position, int64_t head, int dim,
                                          int column, const float (&values)[kDim / 2], int h, const PowerOfTwo& scale) {
  if (rows.data == nullptr) return;
  void* const row = const_cast<void*>(row_pointer(rows, batch, position, head));
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    if (8 * j + column < dim) {
      store_pair(row, rows, 8 * j + column, scale * values[4 * j + 2 * h], scale * values[4 * j + 2 * h + 1]);
    }
  }
}

}  // namespace lla::cuda::tensor
