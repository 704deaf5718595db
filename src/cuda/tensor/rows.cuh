// Elements of bf16, fp16 and fp32 rows: to and from floats, and where they are, whatever the strides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/convert.cuh"
#include "cuda/tensor/fragment.cuh"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::tensor {

__device__ __forceinline__ float widen16(uint16_t bits, DType dtype) {
  return dtype == DType::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                              : __half2float(__ushort_as_half(bits));
}

// Two neighbours of a 16-bit row.
__device__ __forceinline__ uint32_t pack_as(DType dtype, float a, float b) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
  return dtype == DType::bf16 ? *reinterpret_cast<const uint32_t*>(&h) : pack(a, b);
}

// `row` points at the row's first element; columns [column, column + 8).
__device__ __forceinline__ void load_eight(float (&to)[8], const void* row, int column, const Rows& rows) {
  if (rows.dtype == DType::f32) {
    const float* from = static_cast<const float*>(row) + column * rows.channel;
    if (rows.vectors) {
      const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
      to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = from[i * rows.channel];
    }
    return;
  }
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

// Columns (column, column + 1) of a row, in its own type.
__device__ __forceinline__ void store_pair(const Rows& rows, void* row, int column, float a, float b) {
  if (rows.dtype == DType::f32) {
    float* const to = static_cast<float*>(row) + column * rows.channel;
    if (rows.vectors) {
      *reinterpret_cast<float2*>(to) = make_float2(a, b);
    } else {
      to[0] = a, to[rows.channel] = b;
    }
    return;
  }
  const uint32_t word = pack_as(rows.dtype, a, b);
  uint16_t* const to = static_cast<uint16_t*>(row) + column * rows.channel;
  if (rows.vectors) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
    to[0] = static_cast<uint16_t>(word), to[rows.channel] = static_cast<uint16_t>(word >> 16);
  }
}

__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// The power of two a row was multiplied by on its way into a tile. A row with a non-finite element has none.
struct RowScale {
  float word;  // NaN: none

  __device__ __forceinline__ static RowScale of(float scale, bool bad) { return {bad ? NAN : scale}; }
  __device__ __forceinline__ bool usable() const { return finite(word); }
  __device__ __forceinline__ float or_one() const { return usable() ? word : 1.0f; }
};

}  // namespace lla::cuda::tensor
