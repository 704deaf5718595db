// Small kernels, bound by memory: the largest finite magnitude of every head (of keys that may be shifted: the least
// and largest along every axis, from which a kernel between them makes c), then the scaled copies; one kernel for all
// where heads are short. A row with a non-finite element is written as zeros and marked: it cannot
// disturb anyone who does not see it, and the forward kernel makes the rows that do see it NaN. A row so small that
// fp16 loses digits is marked, too: who sees it says so.
#include "cuda/common/launch.cuh"
#include "cuda/tensor/ptx.cuh"
#include "cuda/tensor/prepass.hpp"
#include "cuda/tensor/rows.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::tensor {
namespace {

constexpr int kThreads = 256;

struct Chunk {
  int32_t head, first, last;  // positions [first, last) of a head
};

__device__ __forceinline__ uint32_t chunks_of(const PrepassParams& params) {
  return static_cast<uint32_t>(prepass_chunks(params.positions));
}
__device__ __forceinline__ Chunk chunk_of_block(const PrepassParams& params) {
  const uint32_t chunks = chunks_of(params), head = blockIdx.x / chunks;
  const int32_t first = static_cast<int32_t>(blockIdx.x - head * chunks) * kPrepassRows;
  return {static_cast<int32_t>(head), first, min(first + kPrepassRows, params.positions)};
}

// Positions that belong to a sequence. Those behind the last one may hold anything, and must not set a head's scale.
__device__ __forceinline__ int32_t used_positions(const PrepassParams& params) {
  return params.end != nullptr ? min(*params.end, params.positions) : params.positions;
}

// Largest over the block, in every thread.
__device__ __forceinline__ float block_max(float x) {
  __shared__ float warps[kThreads / 32];
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = warps[threadIdx.x % (kThreads / 32)];
  for (int mask = kThreads / 64; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// Largest finite magnitude of a chunk, in every thread.
__device__ __forceinline__ float largest_of(const PrepassParams& params, const PrepassOperand& operand,
                                            const Chunk& chunk) {
  const int eights = operand.dim / 8;
  const int batch = chunk.head / params.heads_kv, head = chunk.head % params.heads_kv;
  const int32_t last = min(chunk.last, used_positions(params));
  float largest = 0;
  for (int i = threadIdx.x; i < (last - chunk.first) * eights; i += kThreads) {
    float x[8];
    load_eight(x, row_pointer(operand.rows, batch, chunk.first + i / eights, head), i % eights * 8, operand.rows);
    for (int j = 0; j < 8; ++j) largest = finite(x[j]) ? fmaxf(largest, fabsf(x[j])) : largest;
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
template <int kPadded>
__device__ __forceinline__ Span span_of(const PrepassParams& params, const PrepassOperand& operand,
                                        const Chunk& chunk) {
  constexpr int kLanes = kPadded / 8, kWarps = kThreads / 32;
  __shared__ Span warps[kWarps][kPadded];
  const int batch = chunk.head / params.heads_kv, head = chunk.head % params.heads_kv;
  const int32_t last = min(chunk.last, used_positions(params));
  const int lane = threadIdx.x % kLanes;
  Span own[8];
  if (lane * 8 < operand.dim) {
    for (int32_t position = chunk.first + threadIdx.x / kLanes; position < last; position += kThreads / kLanes) {
      float x[8];
      load_eight(x, row_pointer(operand.rows, batch, position, head), lane * 8, operand.rows);
#pragma unroll
      for (int j = 0; j < 8; ++j) own[j].take(x[j]);
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

// Writes the scaled copy of a chunk, marks its rows and counts those in `marked`. `shift`: c of the head, or null.
// Returns the largest squared norm among the rows this thread took part in.
template <int kPadded>
__device__ __forceinline__ float copy_chunk(const PrepassParams& params, const PrepassOperand& operand,
                                            const Chunk& chunk, float largest, const float* shift, uint32_t* marked) {
  constexpr int kLanes = kPadded / 8;  // threads of a row
  const int batch = chunk.head / params.heads_kv, head = chunk.head % params.heads_kv;
  const float scale = power_of_two_scale(largest);
  const int lane = threadIdx.x % kLanes;
  const int64_t first_row = int64_t{chunk.head} * params.positions;
  const int32_t used = used_positions(params);
  float c[8] = {};
  for (int j = 0; j < 8 && shift != nullptr; ++j) c[j] = shift[lane * 8 + j];
  float largest_norm = 0;
  for (int r = threadIdx.x / kLanes; r < kPrepassRows; r += kThreads / kLanes) {
    const int position = chunk.first + r;
    const bool here = position < chunk.last;
    float x[8] = {};
    if (here && position < used && lane * 8 < operand.dim) {
      load_eight(x, row_pointer(operand.rows, batch, position, head), lane * 8, operand.rows);
    }
    bool bad = false;
    for (int j = 0; j < 8; ++j) bad |= !finite(x[j]);
    if (here && position < used) {
      for (int j = 0; j < 8; ++j) x[j] -= c[j];
    }
    const uint32_t row_mask = (kLanes == 32 ? 0xffffffffu : ((1u << kLanes) - 1))
                              << (threadIdx.x % 32 / kLanes * kLanes);
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
    largest_norm = fmaxf(largest_norm, norm);
    if (!here) continue;
    *reinterpret_cast<uint4*>(operand.copy + (first_row + position) * kPadded + lane * 8) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (lane == 0) {
      const Mark mark = bad ? kNotFinite : most > 0 && most < kLeastOfLargest * largest ? kTooSmall : kOrdinary;
      operand.marks[first_row + position] = mark;
      if (mark != kOrdinary) atomicAdd(marked, 1u);
    }
  }
  return largest_norm;
}

// A little more than the rounded root, so that it stays a bound.
__device__ __forceinline__ uint32_t norm_bound(float largest_squared) {
  return __float_as_uint(sqrtf(largest_squared) * 1.0001f);
}

// The largest of every chunk, which the copying kernel puts together: nothing need be cleared before. What that one
// counts up is cleared here.
template <int kPadded>
__global__ void __launch_bounds__(kThreads) largest_kernel(const __grid_constant__ PrepassParams params) {
  let_next_kernel_begin();
  const Chunk chunk = chunk_of_block(params);
  const PrepassOperand& operand = params.operand[blockIdx.y];
  if (operand.keys && params.shift != nullptr) {
    const Span span = span_of<kPadded>(params, operand, chunk);
    float* const to = params.chunk_bounds + int64_t{blockIdx.x} * 2 * kPadded + threadIdx.x;
    if (threadIdx.x < kPadded) to[0] = span.least, to[kPadded] = span.largest;
  } else {
    const float largest = largest_of(params, operand, chunk);
    if (threadIdx.x == 0) params.chunk_maxima[2 * int64_t{blockIdx.x} + blockIdx.y] = largest;
  }
  if (threadIdx.x != 0 || chunk.first != 0 || blockIdx.y != 0) return;
  params.heads[chunk.head] = {};
  if (chunk.head == 0) *params.header = Header{};
}

// A block for every head: c, and the scale of k - c.
template <int kPadded>
__global__ void __launch_bounds__(kPadded) shift_kernel(const __grid_constant__ PrepassParams params) {
  let_next_kernel_begin();
  const uint32_t chunks = chunks_of(params), head = blockIdx.x;
  const float* from = params.chunk_bounds + int64_t{head} * chunks * 2 * kPadded + threadIdx.x;
  wait_for_last_kernel();
  Span span;
  for (uint32_t i = 0; i < chunks; ++i, from += 2 * kPadded) span.join({from[0], from[kPadded]});
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

template <int kPadded>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ PrepassParams params) {
  let_next_kernel_begin();
  const PrepassOperand& operand = params.operand[blockIdx.y];
  const Chunk chunk = chunk_of_block(params);
  const uint32_t chunks = chunks_of(params);
  const float* const maxima = params.chunk_maxima + 2 * int64_t{chunk.head} * chunks + blockIdx.y;
  wait_for_last_kernel();
  HeadStatistics& statistics = params.heads[chunk.head];
  const bool known = operand.keys && params.shift != nullptr;
  float largest = 0;
  if (known) {
    largest = __uint_as_float(statistics.largest_key);
  } else {
    for (uint32_t i = threadIdx.x; i < chunks; i += kThreads) largest = fmaxf(largest, maxima[2 * int64_t{i}]);
    largest = block_max(largest);
  }
  if (!known && chunk.first == 0 && threadIdx.x == 0) {
    (operand.keys ? statistics.largest_key : statistics.largest_value) = __float_as_uint(largest);
  }
  const float* const shift =
      known && (__ldcg(&statistics.marked) & kShifted) ? params.shift + chunk.head * kPadded : nullptr;
  float largest_norm = copy_chunk<kPadded>(params, operand, chunk, largest, shift, &statistics.marked);
  if (!operand.keys) return;
  largest_norm = block_max(largest_norm);
  if (threadIdx.x == 0) atomicMax(&statistics.largest_norm, norm_bound(largest_norm));
}

// Everything for heads that one block can take: nothing need be cleared before it.
template <int kPadded>
__global__ void __launch_bounds__(kThreads) whole_heads_kernel(const __grid_constant__ PrepassParams params) {
  __shared__ uint32_t marked;
  __shared__ float shifts[kPadded];
  let_next_kernel_begin();
  if (threadIdx.x == 0) {
    marked = 0;
    if (blockIdx.x == 0) *params.header = Header{};
  }
  const Chunk chunk{static_cast<int32_t>(blockIdx.x), 0, params.positions};
  // The first maximum's barriers stand between the zero above and the counting.
  float largest_key;
  bool shifted = false;
  if (params.shift != nullptr) {
    float c = 0;
    largest_key = 0;
    const Span span = span_of<kPadded>(params, params.operand[0], chunk);
    if (threadIdx.x < kPadded) {
      c = shift_of(span, params.operand[0].rows.dtype, largest_key);
      shifts[threadIdx.x] = params.shift[chunk.head * kPadded + threadIdx.x] = c;
    }
    shifted = __syncthreads_or(c != 0);
    largest_key = block_max(largest_key);
  } else {
    largest_key = largest_of(params, params.operand[0], chunk);
  }
  const float* const shift = shifted ? shifts : nullptr;
  const float largest_norm =
      block_max(copy_chunk<kPadded>(params, params.operand[0], chunk, largest_key, shift, &marked));
  const float largest_value = largest_of(params, params.operand[1], chunk);
  copy_chunk<kPadded>(params, params.operand[1], chunk, largest_value, nullptr, &marked);
  __syncthreads();
  if (threadIdx.x == 0) {
    params.heads[chunk.head] = {__float_as_uint(largest_key), __float_as_uint(largest_value), norm_bound(largest_norm),
                                marked | (shifted ? kShifted : 0)};
  }
}

}  // namespace

Status run_prepass(const PrepassParams& params, cudaStream_t stream) {
  if (params.positions <= kPrepassRows && params.head_count > 0) {
    const auto kernel = params.padded == 64 ? whole_heads_kernel<64> : whole_heads_kernel<128>;
    return launch(kernel, int64_t{params.head_count}, kThreads, 0, stream, "the pre-pass over keys and values", params);
  }
  const dim3 grid(static_cast<unsigned>(prepass_chunks(params.positions) * params.head_count), 2);
  if (grid.x == 0) {
    const auto bytes = reinterpret_cast<char*>(params.chunk_maxima) - reinterpret_cast<char*>(params.header);
    return to_status(cudaMemsetAsync(params.header, 0, static_cast<size_t>(bytes), stream), "clearing the counters");
  }
  const bool narrow = params.padded == 64;
  LLA_RETURN_IF_ERROR(launch(narrow ? largest_kernel<64> : largest_kernel<128>, grid, kThreads, 0, stream,
                             "the pre-pass's largest elements", params));
  if (params.shift != nullptr) {
    LLA_RETURN_IF_ERROR(launch_early(narrow ? shift_kernel<64> : shift_kernel<128>,
                                     dim3(static_cast<unsigned>(params.head_count)), params.padded, 0, stream,
                                     "the pre-pass's shift of keys", params));
  }
  return launch_early(narrow ? copy_kernel<64> : copy_kernel<128>, grid, kThreads, 0, stream,
                      "the pre-pass over keys and values", params);
}

}  // namespace lla::cuda::tensor
