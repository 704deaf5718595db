// What the kernels of the pre-pass do with a chunk of a head's keys or values, wherever these lie: the chunks of dense
// and packed tensors are PrepassChunk (prepass.cu), those of caches CacheChunk (cache/prepass.cu). Such a chunk has
//   first, last          positions it writes, of at most kPrepassRows
//   used                 positions from here on may hold anything: they are copied as zeros, unread
//   row(operand, i)      where position i lies; null where there is nothing to read (only if kMayMiss)
//   copy_row(i)          where its copy goes
#pragma once

#include "cuda/sm90/ptx.cuh"
#include "cuda/tensor/prepass.hpp"
#include "cuda/tensor/rows.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::tensor {

inline constexpr int kPrepassThreads = 256;
inline constexpr int kPrepassBlocks = 4;  // of a multiprocessor

// Eight elements of a position; zeros where there is nothing to read.
template <class Chunk>
__device__ __forceinline__ void load_position(float (&x)[8], const Chunk& chunk, const PrepassOperand& operand,
                                              int32_t position, int column) {
  const void* const row = chunk.row(operand, position);
  if constexpr (Chunk::kMayMiss) {
    if (row == nullptr) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = 0;
      return;
    }
  }
  load_eight(x, row, column, operand.rows);
}

// The same of several positions (-1: none). All of them are under way before the first is used: what a block does here
// is wait for memory.
inline constexpr int kLoadsTogether = 4;
using Positions = int32_t[kLoadsTogether];
using Eights = float[kLoadsTogether][8];
template <class Chunk>
__device__ __forceinline__ void load_positions(Eights& x, const Chunk& chunk, const PrepassOperand& operand,
                                               const Positions& positions, const Positions& columns) {
  const Rows& rows = operand.rows;
  const bool words = rows.vectors && rows.dtype != DType::f32;
  uint4 raw[kLoadsTogether];
#pragma unroll
  for (int k = 0; k < kLoadsTogether; ++k) {
    const void* const row = words && positions[k] >= 0 ? chunk.row(operand, positions[k]) : nullptr;
    raw[k] = make_uint4(0, 0, 0, 0);
    if (row != nullptr) raw[k] = __ldg(reinterpret_cast<const uint4*>(row) + columns[k] / 8);
  }
#pragma unroll
  for (int k = 0; k < kLoadsTogether; ++k) {
    const uint32_t pairs[4] = {raw[k].x, raw[k].y, raw[k].z, raw[k].w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[k][j] = widen16(static_cast<uint16_t>(pairs[j / 2] >> (j % 2 * 16)), rows.dtype);
    }
    if (!words && positions[k] >= 0) load_position(x[k], chunk, operand, positions[k], columns[k]);
  }
}

// Largest over the block, in every thread.
__device__ __forceinline__ float block_max(float x) {
  __shared__ float warps[kPrepassThreads / 32];
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = warps[threadIdx.x % (kPrepassThreads / 32)];
  for (int mask = kPrepassThreads / 64; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// Largest finite magnitude of a chunk, in every thread.
template <class Chunk>
__device__ __forceinline__ float largest_of(const PrepassOperand& operand, const Chunk& chunk) {
  const int eights = operand.dim / 8;
  const int32_t last = min(chunk.last, chunk.used);
  float largest = 0;
  for (int i = threadIdx.x; i < (last - chunk.first) * eights; i += kLoadsTogether * kPrepassThreads) {
    Positions positions, columns;
#pragma unroll
    for (int k = 0; k < kLoadsTogether; ++k) {
      const int own = i + k * kPrepassThreads, position = chunk.first + own / eights;
      positions[k] = position < last ? position : -1;
      columns[k] = own % eights * 8;
    }
    Eights x;
    load_positions(x, chunk, operand, positions, columns);
#pragma unroll
    for (int j = 0; j < 8 * kLoadsTogether; ++j) {
      const float own = x[j / 8][j % 8];
      largest = finite(own) ? fmaxf(largest, fabsf(own)) : largest;
    }
  }
  return block_max(largest);
}

// What the keys of a head, or of a chunk of it, lie between along an axis; nothing: least > largest.
struct Span {
  float least = INFINITY, largest = -INFINITY;

  __device__ __forceinline__ void take(float x) {
    if (finite(x)) least = fminf(least, x), largest = fmaxf(largest, x);
  }
  __device__ __forceinline__ void join(const Span& other) {
    least = fminf(least, other.least), largest = fmaxf(largest, other.largest);
  }
};

// Finite keys of a chunk along every axis, in thread c for axis c.
template <int kPadded, class Chunk>
__device__ __forceinline__ Span span_of(const PrepassOperand& operand, const Chunk& chunk) {
  constexpr int kLanes = kPadded / 8, kWarps = kPrepassThreads / 32;
  __shared__ Span warps[kWarps][kPadded];
  const int32_t last = min(chunk.last, chunk.used);
  const int lane = threadIdx.x % kLanes;
  Span own[8];
  if (lane * 8 < operand.dim) {
    constexpr int kStep = kPrepassThreads / kLanes;
    for (int32_t position = chunk.first + threadIdx.x / kLanes; position < last; position += kLoadsTogether * kStep) {
      Positions positions, columns;
#pragma unroll
      for (int k = 0; k < kLoadsTogether; ++k) {
        positions[k] = position + k * kStep < last ? position + k * kStep : -1;
        columns[k] = lane * 8;
      }
      Eights x;
      load_positions(x, chunk, operand, positions, columns);
#pragma unroll
      for (int k = 0; k < kLoadsTogether; ++k) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (positions[k] >= 0) own[j].take(x[k][j]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    for (int mask = 16; mask >= kLanes; mask /= 2) {
      own[j].join(
          {__shfl_xor_sync(0xffffffffu, own[j].least, mask), __shfl_xor_sync(0xffffffffu, own[j].largest, mask)});
    }
    if (threadIdx.x % 32 < kLanes) warps[threadIdx.x / 32][lane * 8 + j] = own[j];
  }
  __syncthreads();
  Span all;
  if (threadIdx.x < kPadded) {
    for (int w = 0; w < kWarps; ++w) all.join(warps[w][threadIdx.x]);
  }
  return all;
}

// c along an axis, and the largest |k - c|.
__device__ __forceinline__ float shift_of(const Span& span, DType dtype, float& largest) {
  const float middle = 0.5f * span.least + 0.5f * span.largest, half = 0.5f * span.largest - 0.5f * span.least;
  const bool shift = span.least <= span.largest && half <= shift_limit(dtype == DType::f16) * fabsf(middle);
  const float c = shift ? __bfloat162float(__float2bfloat16(middle)) : 0.0f;
  // Equal keys leave nothing, but queries are measured in the keys' units.
  largest = span.least <= span.largest ? fmaxf(fabsf(span.largest - c), fabsf(span.least - c)) : 0.0f;
  largest = fmaxf(largest, 0x1p-10f * fabsf(c));
  return c;
}

// Writes the scaled copy of a position from eight elements in each of kPadded / 8 threads, and its mark. Returns its
// squared norm. Whole warps together.
template <int kPadded, class Chunk>
__device__ __forceinline__ float copy_position(const PrepassOperand& operand, const Chunk& chunk, int position,
                                               float (&x)[8], float scale, float largest, const float (&c)[8],
                                               uint32_t* marked) {
  constexpr int kLanes = kPadded / 8;  // threads of a row
  const int lane = threadIdx.x % kLanes;
  const bool here = position < chunk.last;
  bool bad = false;
  for (int j = 0; j < 8; ++j) bad |= !finite(x[j]);
  if (here && position < chunk.used) {
    for (int j = 0; j < 8; ++j) x[j] -= c[j];
  }
  const uint32_t row_mask = (kLanes == 32 ? 0xffffffffu : ((1u << kLanes) - 1)) << (threadIdx.x % 32 / kLanes * kLanes);
  bad = (__ballot_sync(0xffffffffu, bad) & row_mask) != 0;
  uint32_t words[4];
  float norm = 0;
  for (int j = 0; j < 4; ++j) {
    const __half2 h = bad ? __half2{} : __floats2half2_rn(x[2 * j] * scale, x[2 * j + 1] * scale);
    words[j] = *reinterpret_cast<const uint32_t*>(&h);
    const float2 back = __half22float2(h);
    norm += back.x * back.x + back.y * back.y;
  }
  float most = 0;
  for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[j]));
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    norm += __shfl_xor_sync(0xffffffffu, norm, mask);
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
  }
  if (!here) return norm;
  *reinterpret_cast<uint4*>(operand.copy + chunk.copy_row(position) * kPadded + lane * 8) =
      make_uint4(words[0], words[1], words[2], words[3]);
  if (lane == 0) {
    const Mark mark = bad ? kNotFinite : most > 0 && most < kLeastOfLargest * largest ? kTooSmall : kOrdinary;
    operand.marks[chunk.copy_row(position)] = mark;
    if (mark != kOrdinary) atomicAdd(marked, 1u);
  }
  return norm;
}

// Writes the scaled copy of a chunk, marks its rows and counts those in `marked`. `shift`: c of the head, or null.
// Returns the largest squared norm among the rows this thread took part in.
template <int kPadded, class Chunk>
__device__ __forceinline__ float copy_chunk(const PrepassOperand& operand, const Chunk& chunk, float largest,
                                            const float* shift, uint32_t* marked) {
  constexpr int kLanes = kPadded / 8;  // threads of a row
  const float scale = power_of_two_scale(largest);
  const int lane = threadIdx.x % kLanes;
  float c[8] = {};
  for (int j = 0; j < 8 && shift != nullptr; ++j) c[j] = shift[lane * 8 + j];
  float largest_norm = 0;
  constexpr int kStep = kPrepassThreads / kLanes;
  static_assert(kPrepassRows % (kLoadsTogether * kStep) == 0);
#pragma unroll 1
  for (int r = threadIdx.x / kLanes; r < kPrepassRows; r += kLoadsTogether * kStep) {
    Positions positions, columns;
#pragma unroll
    for (int k = 0; k < kLoadsTogether; ++k) {
      const int position = chunk.first + r + k * kStep;
      positions[k] = position < min(chunk.last, chunk.used) && lane * 8 < operand.dim ? position : -1;
      columns[k] = lane * 8;
    }
    Eights x;
    load_positions(x, chunk, operand, positions, columns);
#pragma unroll
    for (int k = 0; k < kLoadsTogether; ++k) {
      const float norm =
          copy_position<kPadded>(operand, chunk, chunk.first + r + k * kStep, x[k], scale, largest, c, marked);
      largest_norm = fmaxf(largest_norm, norm);
    }
  }
  return largest_norm;
}

// A little more than the rounded root, so that it stays a bound.
__device__ __forceinline__ uint32_t norm_bound(float largest_squared) {
  return __float_as_uint(sqrtf(largest_squared) * 1.0001f);
}

// c of a head and the scale of k - c, by a block of kPadded threads, one for an axis.
template <int kPadded>
__device__ __forceinline__ void find_shift(const PrepassParams& params, uint32_t head, const Span& span) {
  float largest;
  const float c = shift_of(span, params.operand[0].rows.dtype, largest);
  params.shift[head * kPadded + threadIdx.x] = c;
  __shared__ uint32_t most;
  if (threadIdx.x == 0) most = 0;
  const bool any = __syncthreads_or(c != 0);
  atomicMax(&most, __float_as_uint(largest));
  __syncthreads();
  if (threadIdx.x == 0) params.heads[head] = {most, 0, 0, any ? kShifted : 0};
}

// Copies a chunk with its head's scale and shift and adds what it finds to the head's statistics. `maxima`: of the
// head's chunks, `stride` apart.
template <int kPadded, class Chunk>
__device__ __forceinline__ void copy_with_statistics(const PrepassParams& params, const PrepassOperand& operand,
                                                     const Chunk& chunk, uint32_t head, const float* maxima,
                                                     uint32_t chunks, int64_t stride) {
  HeadStatistics& statistics = params.heads[head];
  const bool known = operand.keys && params.shift != nullptr;
  float largest = 0;
  if (known) {
    largest = __uint_as_float(statistics.largest_key);
  } else {
    for (uint32_t i = threadIdx.x; i < chunks; i += kPrepassThreads) largest = fmaxf(largest, maxima[stride * i]);
    largest = block_max(largest);
  }
  if (!known && chunk.first == 0 && threadIdx.x == 0) {
    (operand.keys ? statistics.largest_key : statistics.largest_value) = __float_as_uint(largest);
  }
  const float* const shift = known && (__ldcg(&statistics.marked) & kShifted) ? params.shift + head * kPadded : nullptr;
  float largest_norm = copy_chunk<kPadded>(operand, chunk, largest, shift, &statistics.marked);
  if (!operand.keys) return;
  largest_norm = block_max(largest_norm);
  if (threadIdx.x == 0) atomicMax(&statistics.largest_norm, norm_bound(largest_norm));
}

}  // namespace lla::cuda::tensor
