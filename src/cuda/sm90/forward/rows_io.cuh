// Rows between global memory and a warpgroup: queries in, ridge and given x in, results out.
#pragma once

#include "cuda/sm90/forward/block.cuh"
#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/scale.hpp"

namespace lla::cuda::sm90 {

// 64 rows (queries, or the gradient of o) as fp16, each row scaled by a power of two, into a swizzled tile. Rows that do not exist are zero; rows with
// a non-finite element are zero with scale NaN. With kSplit what rounding leaves over goes into the tile `low`.
template <int kDim, bool kSplit = false>
__device__ __forceinline__ void load_rows(__half* tile, float* row_scale, const Rows& rows, int dim, float sign,
                                          const Block& block, int first_row, int thread, __half* low = nullptr) {
  constexpr int kLanes = kDim / 8;  // threads of a row
  const int lane = thread % kLanes;
#pragma unroll 4
  for (int r = thread / kLanes; r < kGroupRows; r += kWarpgroup / kLanes) {
    const int row = first_row + r;
    float x[8] = {};
    if (row < block.length_q && lane * 8 < dim) {
      load_eight(x, row_pointer(rows, block.batch, int64_t{block.start_q} + row, block.head), lane * 8, rows);
    }
    float largest = 0;
    bool bad = false;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      bad |= !finite(x[j]);
      largest = fmaxf(largest, fabsf(x[j]));
    }
    if (bad) largest = INFINITY;
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    bad = largest == INFINITY;
    const float scale = power_of_two_scale(bad ? 0.0f : largest);
    const float signed_scale = bad ? 0.0f : sign * scale;
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = bad ? 0u : pack(x[2 * j] * signed_scale, x[2 * j + 1] * signed_scale);
    const int at = (lane / 8) * (kGroupRows * 128) + r * 128 + (((lane % 8) ^ (r & 7)) << 4);
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + at) = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (kSplit) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 high = unpack(words[j]);
        words[j] = bad ? 0u : pack(fmaf(x[2 * j], signed_scale, -high.x), fmaf(x[2 * j + 1], signed_scale, -high.y));
      }
      *reinterpret_cast<uint4*>(reinterpret_cast<char*>(low) + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (lane == 0) row_scale[r] = bad ? NAN : scale;
  }
}

template <int kDim>
__device__ __forceinline__ void load_queries(__half* tile, float* row_scale, const ForwardParams& p, const Block& block,
                                             int first_row, int thread) {
  load_rows<kDim>(tile, row_scale, p.q, p.dim, p.negative_scale ? -1.0f : 1.0f, block, first_row, thread);
}

// λ of a row that has one number.
__device__ __forceinline__ float row_ridge(const Ridge& ridge, const Block& block, int64_t row) {
  return ridge.data[block.batch * ridge.batch + (block.start_q + row) * ridge.position + block.head * ridge.head];
}

// λ per dimension, into fragment order. Dimensions with λ = +inf leave the right-hand side; a row with a negative or NaN
// element is no longer good.
template <int kDim>
__device__ __forceinline__ void load_ridge(float* to, float (&rhs)[kDim / 2], Pair<bool>& good, const ForwardParams& p,
                                           const Block& block, const Pair<int>& row, const Lane& lane) {
  Pair<bool> valid = {true, true};
  const float* from[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    from[r] = p.ridge.data + block.batch * p.ridge.batch + (int64_t{block.start_q} + row[r]) * p.ridge.position +
              block.head * p.ridge.head;
  }
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    keep_order();
    float lambda[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = 8 * i + lane.column + (j & 1);
      lambda[j] = column < p.dim ? from[j / 2][column * p.ridge.dim] : 0.0f;
      valid[j / 2] = valid[j / 2] && lambda[j] >= 0;
      if (lambda[j] == INFINITY) rhs[4 * i + j] = 0;
    }
    reinterpret_cast<float4*>(to)[i * kWarpgroup + lane.thread] = make_float4(lambda[0], lambda[1], lambda[2], lambda[3]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) good[r] = quad_max(valid[r] ? 0.0f : 1.0f) == 0.0f && good[r];
}

// A row of x as given by the caller, times `scale`. good[r] is cleared for a row with a non-finite element.
template <int kDim>
__device__ __forceinline__ void load_given_x(float (&to)[kDim / 2], Pair<bool>& good, const ForwardParams& p, const Block& block,
                                             const Pair<int>& row, const Lane& lane, float scale) {
  good[0] = good[1] = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const void* from = row_pointer(p.x, block.batch, int64_t{block.start_q} + row[r], block.head);
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      if (i % 8 == 0) keep_order();
      const int column = 8 * (i / 2) + lane.column + (i & 1), e = 4 * (i / 2) + 2 * r + (i & 1);
      float v = 0;
      if (column < p.dim) {
        v = p.x.dtype == DType::f32 ? static_cast<const float*>(from)[column * p.x.channel]
                                    : widen16(static_cast<const uint16_t*>(from)[column * p.x.channel], p.x.dtype);
      }
      good[r] = good[r] && finite(v);
      to[e] = v * scale;
    }
    good[r] = quad_max(good[r] ? 0.0f : 1.0f) == 0.0f;
  }
}

// Writes rows as fp32, row-major with `dim` columns, into a section of the saved vector.
template <int kDim>
__device__ __forceinline__ void store_saved(float* to, const float (&v)[kDim / 2], int dim, const ForwardParams& p,
                                            const Block& block, const OwnRows& rows, const Pair<float>& scale,
                                            const Lane& lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.exists[r]) continue;
    float* const row = to + row_index(p, block, rows.row[r]) * dim + lane.column;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      if (8 * i + lane.column >= dim) continue;
      *reinterpret_cast<float2*>(row + 8 * i) = make_float2(v[4 * i + 2 * r] * scale[r], v[4 * i + 2 * r + 1] * scale[r]);
    }
  }
}

// Writes output rows in their own type.
template <int kDim>
__device__ __forceinline__ void store_output(const Rows& o, const float (&v)[kDim / 2], int dim, const Block& block,
                                             const OwnRows& rows, const Lane& lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.exists[r]) continue;
    char* const to = static_cast<char*>(const_cast<void*>(row_pointer(o, block.batch, int64_t{block.start_q} + rows.row[r], block.head)));
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const int column = 8 * i + lane.column;
      const float a = v[4 * i + 2 * r], b = v[4 * i + 2 * r + 1];
      if (column >= dim) continue;
      if (o.dtype == DType::f32) {
        float* at = reinterpret_cast<float*>(to) + column * o.channel;
        if (o.vectors) {
          *reinterpret_cast<float2*>(at) = make_float2(a, b);
        } else {
          at[0] = a, at[o.channel] = b;
        }
        continue;
      }
      uint32_t word;
      if (o.dtype == DType::bf16) {
        const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
        word = *reinterpret_cast<const uint32_t*>(&h);
      } else {
        word = pack(a, b);
      }
      uint16_t* at = reinterpret_cast<uint16_t*>(to) + column * o.channel;
      if (o.vectors) {
        *reinterpret_cast<uint32_t*>(at) = word;
      } else {
        at[0] = static_cast<uint16_t>(word), at[o.channel] = static_cast<uint16_t>(word >> 16);
      }
    }
  }
}

}  // namespace lla::cuda::sm90
