// What the decode kernels have in common: numbers in pairs, small matrices, sums over the threads that share a key or a
// column.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/decode/walk.cuh"
#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kWarpKeys = 16;  // of a tile

template <bool kBf16>
__device__ __forceinline__ float2 widen_pair(uint32_t x) {
  if constexpr (kBf16) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  }
}
__device__ __forceinline__ float2 half_pair(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
__device__ __forceinline__ uint32_t to_half_pair(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t multiply_half_pairs(uint32_t a, uint32_t b) {
  const __half2 h = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&h);
}

template <bool kBf16>
__device__ __forceinline__ uint32_t narrow_pair(float a, float b) {
  if constexpr (kBf16) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&x);
  } else {
    return to_half_pair(a, b);
  }
}

// 4^exponent, 0 where that is too small for a float; `exponent` is below 64.
__device__ __forceinline__ float four_to(int exponent) {
  const int e = 2 * exponent + 127;
  return e <= 0 ? 0.0f : __int_as_float(min(e, 254) << 23);
}

template <class Op>
__device__ __forceinline__ float warp_reduce(float x, Op op) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  return warp_reduce(x, [](float a, float b) { return a + b; });
}

// Where four threads share a column (or a key, of four others): over them.
__device__ __forceinline__ float keys_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float keys_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// Over the eight that have the same place among the four.
__device__ __forceinline__ float column_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

}  // namespace lla::cuda::sm90::decode
