// Storage types on the device: widening is exact, narrowing rounds to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "lla/lla.hpp"

namespace lla::cuda {

template <class To>
__device__ __forceinline__ To widen(float x) {
  return static_cast<To>(x);
}
template <class To>
__device__ __forceinline__ To widen(double x) {
  return static_cast<To>(x);
}
template <class To>
__device__ __forceinline__ To widen(__nv_bfloat16 x) {
  return static_cast<To>(__bfloat162float(x));
}
template <class To>
__device__ __forceinline__ To widen(__half x) {
  return static_cast<To>(__half2float(x));
}

// Element `at` of an array whose type is known at run time (the same for all threads, so the branch costs little).
template <class To>
__device__ __forceinline__ To load_as(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::f32: return widen<To>(static_cast<const float*>(data)[at]);
    case DType::f64: return widen<To>(static_cast<const double*>(data)[at]);
    case DType::bf16: return widen<To>(static_cast<const __nv_bfloat16*>(data)[at]);
    default: return widen<To>(static_cast<const __half*>(data)[at]);
  }
}

// double goes through float for the 16-bit types: no kernel stores f64 results there.
template <class From>
__device__ __forceinline__ void store_as(void* data, DType dtype, int64_t at, From x) {
  switch (dtype) {
    case DType::f32: static_cast<float*>(data)[at] = static_cast<float>(x); break;
    case DType::f64: static_cast<double*>(data)[at] = static_cast<double>(x); break;
    case DType::bf16: static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(static_cast<float>(x)); break;
    default: static_cast<__half*>(data)[at] = __float2half_rn(static_cast<float>(x)); break;
  }
}

// The least magnitude that rounds to infinity in this type: of a row that has one the status says so.
__device__ __forceinline__ float least_infinite(DType dtype) {
  return dtype == DType::f16 ? 65520.0f : dtype == DType::bf16 ? 0x1.ffp127f : INFINITY;
}

}  // namespace lla::cuda
