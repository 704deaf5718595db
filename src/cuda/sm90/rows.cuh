// Reading eight elements of a bf16 or fp16 row as floats, whatever its strides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/forward/params.hpp"

namespace lla::cuda::sm90 {

__device__ __forceinline__ float widen16(uint16_t bits, DType dtype) {
  return dtype == DType::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// `row` points at the row's first element; columns [column, column + 8) of a 16-bit type.
__device__ __forceinline__ void load_eight(float (&to)[8], const void* row, int column, const Rows& rows) {
  const uint16_t* from = static_cast<const uint16_t*>(row);
  uint16_t bits[8];
  if (rows.vectors) {
    *reinterpret_cast<uint4*>(bits) = __ldg(reinterpret_cast<const uint4*>(from + column));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = from[(column + i) * rows.channel];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = widen16(bits[i], rows.dtype);
}

__device__ __forceinline__ const void* row_pointer(const Rows& rows, int64_t batch, int64_t position, int64_t head) {
  const int64_t at = batch * rows.batch + position * rows.position + head * rows.head;
  return static_cast<const char*>(rows.data) + at * (rows.dtype == DType::f32 ? 4 : 2);
}

__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }

}  // namespace lla::cuda::sm90
