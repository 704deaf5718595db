// Rows between global memory and a warpgroup: queries and ridge in, results out.
#pragma once

#include "cuda/tensor/block.cuh"
#include "cuda/tensor/cg.cuh"
#include "cuda/tensor/fragment.cuh"
#include "cuda/tensor/ptx.cuh"
#include "cuda/tensor/rows.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::tensor {

// 64 rows (queries, x, the gradient of o) as fp16, each scaled by a power of two, into a swizzled tile. Rows that do
// not exist are zero; rows with a non-finite element are zero and have no scale. In two steps, so that the loads of one
// or of several operands are all in flight before the first is used. kWide: f32 rows; else 16-bit ones. Rows of the
// other kind, and rows without vectors, are read one by one where they are written.
//
// What is fetched lies in the tile itself (f32 rows: and in `low`) until the thread that fetched it writes it anew:
// registers would have to be named in code without a loop, and code that runs once an item must be short.
template <int kDim, bool kWide = false>
struct RowLoader {
  static constexpr int kLanes = kDim / 8;  // threads of a row
  static constexpr int kStep = kWarpgroupThreads / kLanes, kCount = kWarpgroupRows / kStep;
  static constexpr int kVectors = kWide ? 2 : 1;  // of eight elements
  static constexpr int kTogether = 4;             // rows whose reductions hide each other's latency

  const Rows& rows;
  const QueryBlock& block;
  int dim, first_row, lane, row;  // this thread's rows are row, row + kStep, ... of the 64
  __half *const tile, *const low;

  __device__ __forceinline__ RowLoader(const Rows& from, int dimensions, const QueryBlock& of, int first, int thread,
                                       __half* to, __half* low_part = nullptr)
      : rows(from),
        block(of),
        dim(dimensions),
        first_row(first),
        lane(thread % kLanes),
        row(thread / kLanes),
        tile(to),
        low(low_part) {}

  __device__ __forceinline__ bool here(int i) const {
    return first_row + row + i * kStep < block.length_q && lane * 8 < dim;
  }
  __device__ __forceinline__ const char* pointer(int i) const {
    return static_cast<const char*>(
        row_pointer(rows, block.batch, int64_t{block.start_q} + first_row + row + i * kStep, block.head));
  }
  __device__ __forceinline__ bool fetched() const { return rows.vectors && (rows.dtype == DType::f32) == kWide; }
  // Of this thread's eight elements.
  __device__ __forceinline__ uint4* place(__half* in, int i) const {
    static_assert(kStep % 8 == 0);  // so that all rows of a thread are swizzled alike
    return reinterpret_cast<uint4*>(reinterpret_cast<char*>(in) + tile_offset(row, lane) + i * (kStep * 128));
  }

  __device__ __forceinline__ void fetch() const {
    if (!fetched()) return;
    const char* from = pointer(0) + lane * (16 * kVectors);
    const int64_t stride = rows.position * (kStep * 2 * kVectors);
    const int left = lane * 8 < dim ? block.length_q - first_row - row : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i, from += stride) {
      const bool there = i * kStep < left;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        copy_ahead(place(j == 0 ? tile : low, i), there ? from + 16 * j : rows.data, there);
      }
    }
  }

  // With kTwoParts what rounding leaves over goes into the tile `low`.
  template <bool kTwoParts>
  __device__ __forceinline__ void write(RowScale* row_scale, float sign) const {
    static_assert(kTwoParts || !kWide);
    if (fetched()) {
      wait_copied_ahead();
#pragma unroll 1
      for (int i = 0; i < kCount; i += kTogether) write_fetched<kTwoParts>(i, row_scale, sign);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kCount; i += kTogether) {
      float x[kTogether][8] = {};
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (here(i + k)) load_eight(x[k], pointer(i + k), lane * 8, rows);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        write_row<kTwoParts>(x[k], row_largest(largest_bits(x[k])), i + k, row_scale, sign);
      }
    }
  }

  // kTogether rows from the i-th on.
  template <bool kTwoParts>
  __device__ __forceinline__ void write_fetched(int i, RowScale* row_scale, float sign) const {
    uint32_t from[kTogether][4 * kVectors], bits[kTogether];
    float x[kTogether][8];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const uint4 v = *place(j == 0 ? tile : low, i + k);
        from[k][4 * j] = v.x, from[k][4 * j + 1] = v.y, from[k][4 * j + 2] = v.z, from[k][4 * j + 3] = v.w;
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if constexpr (kWide) {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[k][j] = __uint_as_float(from[k][j]);
        bits[k] = row_largest(largest_bits(x[k]));
      } else {
        uint32_t pair = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) pair = __vmaxu2(pair, from[k][j] & 0x7fff7fffu);
        const uint32_t largest = row_largest(max(pair & 0xffffu, pair >> 16));
        bits[k] = __float_as_uint(widen16(static_cast<uint16_t>(largest), rows.dtype));
      }
    }
    if constexpr (!kWide) {
      if (rows.dtype == DType::bf16) {
        widen<DType::bf16>(x, from);
      } else {
        widen<DType::f16>(x, from);
      }
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) write_row<kTwoParts>(x[k], bits[k], i + k, row_scale, sign);
  }
  template <DType kType>
  __device__ __forceinline__ static void widen(float (&x)[kTogether][8], const uint32_t (&from)[kTogether][4]) {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[k][2 * j] = widen16(static_cast<uint16_t>(from[k][j]), kType);
        x[k][2 * j + 1] = widen16(static_cast<uint16_t>(from[k][j] >> 16), kType);
      }
    }
  }

  // Of the largest magnitude: bits are ordered like the numbers, infinity and NaN above all.
  __device__ __forceinline__ static uint32_t largest_bits(const float (&x)[8]) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) bits = max(bits, __float_as_uint(x[j]) & 0x7fffffffu);
    return bits;
  }

  // Over the threads of a row.
  __device__ __forceinline__ static uint32_t row_largest(uint32_t bits) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, mask));
    return bits;
  }

  template <bool kTwoParts>
  __device__ __forceinline__ void write_row(const float (&x)[8], uint32_t bits, int i, RowScale* row_scale,
                                            float sign) const {
    const float largest = __uint_as_float(bits);
    const bool bad = !finite(largest);
    const float scale = power_of_two_scale(bad ? 0.0f : largest);
    const float signed_scale = bad ? 0.0f : sign * scale;
    uint32_t half[4], low_words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float a = x[2 * j] * signed_scale, b = x[2 * j + 1] * signed_scale;
      half[j] = bad ? 0u : pack(a, b);
      const float2 rounded = unpack(half[j]);
      low_words[j] = bad ? 0u : pack(a - rounded.x, b - rounded.y);
    }
    *place(tile, i) = make_uint4(half[0], half[1], half[2], half[3]);
    if constexpr (kTwoParts) *place(low, i) = make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
    if (lane == 0) row_scale[row + i * kStep] = RowScale::of(scale, bad);
  }
};

template <int kDim>
__device__ __forceinline__ void load_rows(__half* tile, RowScale* row_scale, const Rows& rows, int dim, float sign,
                                          const QueryBlock& block, int first_row, int thread) {
  const RowLoader<kDim> loader(rows, dim, block, first_row, thread, tile);
  loader.fetch();
  loader.template write<false>(row_scale, sign);
}

template <int kDim>
__device__ __forceinline__ void load_queries(__half* tile, RowScale* row_scale, const ForwardParams& params,
                                             const QueryBlock& block, int first_row, int thread) {
  load_rows<kDim>(tile, row_scale, params.q, params.dim, params.negative_scale ? -1.0f : 1.0f, block, first_row,
                  thread);
}

// c of a head's keys as a fragment's columns: two neighbours for every eight.
template <int kDim>
__device__ __forceinline__ float2 key_shift(const ForwardParams& params, int copy_index, int eight, const Lane& lane) {
  return __ldg(
      reinterpret_cast<const float2*>(params.key_shift + int64_t{copy_index} * kDim + 8 * eight + lane.column));
}

// What shifting the keys takes from a row's logits, in log2 units, for both rows of a thread. `scale`: of raw scores of
// unscaled keys.
template <int kDim>
__device__ __forceinline__ void logit_shift(Pair<float>& to, const ForwardParams& params, int copy_index,
                                            __half* queries, const Pair<float>& scale, const Lane& lane) {
  to[0] = to[1] = 0;
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const float2 q = unpack(tile_word<uint32_t>(queries, lane.tile_offset(i / 2, i & 1)));
    const float2 c = key_shift<kDim>(params, copy_index, i / 2, lane);
    to[i & 1] = fmaf(q.x, c.x, fmaf(q.y, c.y, to[i & 1]));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) to[r] = quad_sum(to[r]) * scale[r];
}

// λ of a row that has one number.
__device__ __forceinline__ const float* row_ridge_at(const Ridge& ridge, const QueryBlock& block, int64_t row) {
  return ridge.data + block.batch * ridge.batch + (block.start_q + row) * ridge.position + block.head * ridge.head;
}
__device__ __forceinline__ float row_ridge(const Ridge& ridge, const QueryBlock& block, int64_t row) {
  return *row_ridge_at(ridge, block, row);
}

// κ² λ per dimension, into fragment order. Dimensions with λ = +inf leave the right-hand side and the mean key; a row
// with a negative or NaN element is no longer good. `least`: the smallest of a row. Rare: a small loop, not a fast one.
template <int kDim>
__device__ __forceinline__ void load_ridge(float* to, float (&rhs)[kDim / 2], float (&mean)[kDim / 2],
                                           Pair<float>& least, Pair<bool>& good, const ForwardParams& params,
                                           const QueryBlock& block, const Pair<int>& row, float key_scale,
                                           const Lane& lane) {
  Pair<bool> valid = {true, true};
  least[0] = least[1] = INFINITY;
  const float* from[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    from[r] = params.ridge.data + block.batch * params.ridge.batch +
              (int64_t{block.start_q} + row[r]) * params.ridge.position + block.head * params.ridge.head +
              lane.column * params.ridge.dim;
  }
  float4* const own = reinterpret_cast<float4*>(to) + lane.thread;
  bool infinite = false;
#pragma unroll 1
  for (int i = 0; i < kDim / 8; ++i) {
    float lambda[4] = {0, 0, 0, 0};
    if (8 * i < params.dim) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        lambda[j] = scaled_ridge(from[j / 2][(8 * i + (j & 1)) * params.ridge.dim], key_scale);
        valid[j / 2] = valid[j / 2] && lambda[j] >= 0;
        least[j / 2] = fminf(least[j / 2], lambda[j]);
        infinite = infinite || lambda[j] == INFINITY;
      }
    }
    own[i * kWarpgroupThreads] = make_float4(lambda[0], lambda[1], lambda[2], lambda[3]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    good[r] = quad_max(valid[r] ? 0.0f : 1.0f) == 0.0f && good[r];
    least[r] = -quad_max(-least[r]);
  }
  if (!infinite) return;
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    const float4 l4 = own[i * kWarpgroupThreads];
    const float lambda[4] = {l4.x, l4.y, l4.z, l4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (lambda[j] == INFINITY) rhs[4 * i + j] = mean[4 * i + j] = 0;
    }
  }
}

// What a thread's four elements of every eight columns go to, whatever the type and the strides.
struct RowStore {
  const Rows& o;
  int dim, column;
  void* to[2];
  Pair<bool> exists;

  __device__ __forceinline__ RowStore(const Rows& rows, int dimensions, const QueryBlock& block, int first_row,
                                      const Lane& lane)
      : o(rows), dim(dimensions), column(lane.column) {
    const OwnRows own(block, first_row, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      exists[r] = own.exists[r];
      to[r] = const_cast<void*>(row_pointer(o, block.batch, int64_t{block.start_q} + own.row[r], block.head));
    }
  }
  __device__ __forceinline__ void operator()(int eight, const float4& v) const {
    const int at = 8 * eight + column;
    if (at >= dim) return;
    if (exists[0]) store_pair(o, to[0], at, v.x, v.y);
    if (exists[1]) store_pair(o, to[1], at, v.z, v.w);
  }
};

// What a warpgroup stages its rows in on their way out: a 64-row, 128-byte-swizzled fp16 tile. A warp uses its own
// sixteen rows of it; nobody else may be reading them.
template <int kDim>
struct Stage {
  static constexpr int kLanes = kDim / 8;  // threads of a row, 16 bytes each
  static constexpr int kStep = 32 / kLanes, kCount = 16 / kStep;
  static constexpr int kHalf = kDim / 16;  // float4s of a thread, of half a fragment

  char* const tile;
  const int warp, lane;

  __device__ __forceinline__ Stage(__half* memory, const Lane& own)
      : tile(reinterpret_cast<char*>(memory)), warp(own.thread / 32), lane(own.thread % 32) {}

  __device__ __forceinline__ char* at(int row, int eight) const { return tile + tile_offset(row, eight); }

  // A fragment as 16-bit rows.
  template <DType kType>
  __device__ __forceinline__ void write(const float (&v)[kDim / 2]) const {
    const char* const to = at(warp * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack_as(kType, v[8 * i + 2 * j], v[8 * i + 2 * j + 1]);
      const uint32_t address = (shared_address(to) ^ ((2 * i % 8) << 4)) + (i / 4) * (kWarpgroupRows * 128);
      store_matrices(address, words);
    }
  }
  // 16-bit rows from here to their places.
  __device__ __forceinline__ void store_vectors(const Rows& o, int dim, const QueryBlock& block, int first_row) const {
    const int eight = lane % kLanes, row = warp * 16 + lane / kLanes;
    uint4 words[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = *reinterpret_cast<const uint4*>(at(row + i * kStep, eight));
    const int left = eight * 8 < dim ? block.length_q - first_row - row : 0;
    char* to = static_cast<char*>(const_cast<void*>(
                   row_pointer(o, block.batch, int64_t{block.start_q} + first_row + row, block.head))) +
               eight * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i * kStep < left) *reinterpret_cast<uint4*>(to) = words[i];
      to += o.position * (2 * kStep);
    }
  }

  // A fragment to rows of any kind. Registers cannot be counted through in a loop: half of them at a time goes where
  // they can, read again by the thread that wrote them.
  __device__ __forceinline__ void store_any(const float (&v)[kDim / 2], const RowStore& store) const {
    float4* const own = reinterpret_cast<float4*>(tile + warp * (16 * 128)) + lane;
    constexpr int kBlock = kWarpgroupRows * 128 / sizeof(float4);  // from a block of 64 columns to the next
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const from = &v[half * (kDim / 4)];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        own[i / 4 * kBlock + i % 4 * 32] = make_float4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
      }
#pragma unroll 1
      for (int i = 0; i < kHalf; ++i) store(half * kHalf + i, own[i / 4 * kBlock + i % 4 * 32]);
    }
  }
};

// Writes output rows through `stage` (see Stage).
template <int kDim>
__device__ __forceinline__ void store_output(const Rows& o, const float (&v)[kDim / 2], int dim,
                                             const QueryBlock& block, int first_row, const Lane& lane, __half* memory) {
  const Stage<kDim> stage(memory, lane);
  __syncwarp();  // all have read what was staged before
  if (o.vectors && o.dtype != DType::f32) {
    if (o.dtype == DType::bf16) {
      stage.template write<DType::bf16>(v);
    } else {
      stage.template write<DType::f16>(v);
    }
    __syncwarp();
    stage.store_vectors(o, dim, block, first_row);
  } else {
    stage.store_any(v, RowStore(o, dim, block, first_row, lane));
  }
}

}  // namespace lla::cuda::tensor
