// The registers a thread holds of a 64 x N product: rows g and g + 8 of its warp's sixteen (g = lane / 4), and of every
// eight columns the pair 2t, 2t + 1 (t = lane % 4). Element e: column 8 (e / 4) + 2t + e % 2, row g + 8 (e / 2 % 2).
// Four threads (a quad) share a row.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/tensor/ptx.cuh"
#include "cuda/tensor/schedule.hpp"

namespace lla::cuda::tensor {

inline constexpr int kWarpgroupThreads = 128;  // threads

// One value for each of the two rows a thread shares.
template <class T>
using Pair = T[2];

__device__ __forceinline__ constexpr int row_of(int element) { return (element >> 1) & 1; }

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// a / b to the last bit or nearly (exact where the quotient is a float), without the slow path; 0 where b is 0.
__device__ __forceinline__ float reciprocal(float b) { return b > 0 ? __frcp_rn(b) : 0.0f; }
__device__ __forceinline__ float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return fmaf(fmaf(-quotient, b, a), inverse, quotient);
}
__device__ __forceinline__ float divide(float a, float b) { return divide(a, b, reciprocal(b)); }

// Tells the compiler that all threads of a warp hold the same value: what depends on it can stay in uniform registers,
// where the tensor cores want their descriptors.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ TileRange uniform(TileRange r) { return {uniform(r.begin), uniform(r.end)}; }

// A walk (LiveWalk) of whole warps together.
struct WarpTogether {
  __device__ __forceinline__ static uint32_t same(uint32_t bits) { return uniform(bits); }
};

// Words whose unpacked halves the compiler shall not keep from one loop to the next.
template <int kCount>
__device__ __forceinline__ void forget(uint32_t (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = opaque(words[i]);
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ float2 unpack(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const __half2 h = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&h);
}

inline constexpr uint32_t kOnePair = 0x3c003c00;  // two fp16 ones

// Byte offset of eight columns of a row in a 64-row, 128-byte-swizzled tile of 16-bit elements.
__device__ __forceinline__ int tile_offset(int row, int eight) {
  return (eight / 8) * (kWarpgroupRows * 128) + row * 128 + (((eight % 8) ^ (row & 7)) << 4);
}

// Rows a thread owns in its warpgroup, and its column pair in every eight.
struct Lane {
  int thread;  // 0 .. 127 in the warpgroup
  int row;     // the second row is row + 8
  int column;  // 2t

  __device__ __forceinline__ explicit Lane(int thread_in_warpgroup)
      : thread(thread_in_warpgroup),
        row(thread_in_warpgroup / 32 * 16 + thread_in_warpgroup % 32 / 4),
        column(thread_in_warpgroup % 4 * 2) {}

  // Byte offset of columns (8 block + 2t, + 1) of row `row + 8 second` in a 64-row, 128-byte-swizzled tile.
  __device__ __forceinline__ uint32_t tile_offset(int block, int second) const {
    return static_cast<uint32_t>(tensor::tile_offset(row + 8 * second, block) + column * 2);
  }
};

// Private vectors of a thread in fragment order: kDim / 8 quads of floats, those of one index side by side over
// threads.
template <int kDim>
struct Fragment {
  static constexpr int kQuads = kDim / 8;
  static constexpr int64_t kElements = int64_t{kWarpgroupRows} * kDim;  // of one warpgroup

  __device__ __forceinline__ static void load(float (&to)[kDim / 2], const float* from, int thread) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 v =
          __ldcg(reinterpret_cast<const float4*>(from) + i * kWarpgroupThreads + thread);  // x is made by L2 additions
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  }
  __device__ __forceinline__ static void store(float* to, const float (&from)[kDim / 2], int thread) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      reinterpret_cast<float4*>(to)[i * kWarpgroupThreads + thread] =
          make_float4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
    }
  }
  // The same vectors as fp16 pairs.
  static constexpr int kHalfVectors = kDim / 16;
  __device__ __forceinline__ static void load_half(uint32_t (&to)[kDim / 4], const uint4* from, int thread) {
#pragma unroll
    for (int i = 0; i < kHalfVectors; ++i) {
      const uint4 v = from[i * kWarpgroupThreads + thread];
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  }
  __device__ __forceinline__ static void store_half(uint4* to, const float (&from)[kDim / 2], int thread) {
#pragma unroll
    for (int i = 0; i < kHalfVectors; ++i) {
      const float* f = &from[8 * i];
      to[i * kWarpgroupThreads + thread] =
          make_uint4(pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7]));
    }
  }
  __device__ __forceinline__ static void fill(float* to, float value, int thread) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      reinterpret_cast<float4*>(to)[i * kWarpgroupThreads + thread] = make_float4(value, value, value, value);
    }
  }
};

}  // namespace lla::cuda::tensor
