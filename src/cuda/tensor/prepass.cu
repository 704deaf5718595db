// Small kernels, bound by memory: the largest finite magnitude of every head (of keys that may be shifted: the least
// and largest along every axis, from which a kernel between them makes c), then the scaled copies; one kernel for all
// where heads are short. A row with a non-finite element is written as zeros and marked: it cannot
// disturb anyone who does not see it, and the forward kernel makes the rows that do see it NaN. A row so small that
// fp16 loses digits is marked, too: who sees it says so.
#include "cuda/common/launch.cuh"
#include "cuda/tensor/prepass.cuh"

namespace lla::cuda::tensor {
namespace {

// A chunk of a dense or packed head.
struct PrepassChunk {
  static constexpr bool kMayMiss = false;
  int32_t head, first, last;  // positions [first, last) of a head
  int32_t used, positions;
  int32_t batch, head_in_batch;

  __device__ __forceinline__ PrepassChunk(const PrepassParams& params, int32_t of_head, int32_t from, int32_t to)
      : head(of_head),
        first(from),
        last(to),
        // Positions that belong to a sequence. Those behind the last one may hold anything, and must not set a head's
        // scale.
        used(params.end != nullptr ? min(*params.end, params.positions) : params.positions),
        positions(params.positions),
        batch(of_head / params.heads_kv),
        head_in_batch(of_head % params.heads_kv) {}
  __device__ __forceinline__ const void* row(const PrepassOperand& operand, int32_t position) const {
    return row_pointer(operand.rows, batch, position, head_in_batch);
  }
  __device__ __forceinline__ int64_t copy_row(int32_t position) const { return int64_t{head} * positions + position; }
};

__device__ __forceinline__ uint32_t chunks_of(const PrepassParams& params) {
  return static_cast<uint32_t>(prepass_chunks(params.positions));
}
__device__ __forceinline__ PrepassChunk chunk_of_block(const PrepassParams& params) {
  const uint32_t chunks = chunks_of(params), head = blockIdx.x / chunks;
  const int32_t first = static_cast<int32_t>(blockIdx.x - head * chunks) * kPrepassRows;
  return {params, static_cast<int32_t>(head), first, min(first + kPrepassRows, params.positions)};
}

// The largest of every chunk, which the copying kernel puts together: nothing need be cleared before. What that one
// counts up is cleared here.
template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads, kPrepassBlocks)
    largest_kernel(const __grid_constant__ PrepassParams params) {
  let_next_kernel_begin();
  const PrepassChunk chunk = chunk_of_block(params);
  const PrepassOperand& operand = params.operand[blockIdx.y];
  if (operand.keys && params.shift != nullptr) {
    const Span span = span_of<kPadded>(operand, chunk);
    float* const to = params.chunk_bounds + int64_t{blockIdx.x} * 2 * kPadded + threadIdx.x;
    if (threadIdx.x < kPadded) to[0] = span.least, to[kPadded] = span.largest;
  } else {
    const float largest = largest_of(operand, chunk);
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
  find_shift<kPadded>(params, head, span);
}

template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads, kPrepassBlocks)
    copy_kernel(const __grid_constant__ PrepassParams params) {
  let_next_kernel_begin();
  const PrepassOperand& operand = params.operand[blockIdx.y];
  const PrepassChunk chunk = chunk_of_block(params);
  const uint32_t chunks = chunks_of(params);
  const float* const maxima = params.chunk_maxima + 2 * int64_t{chunk.head} * chunks + blockIdx.y;
  wait_for_last_kernel();
  copy_with_statistics<kPadded>(params, operand, chunk, chunk.head, maxima, chunks, 2);
}

// Everything for heads that one block can take: nothing need be cleared before it.
template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads) whole_heads_kernel(const __grid_constant__ PrepassParams params) {
  __shared__ uint32_t marked;
  __shared__ float shifts[kPadded];
  let_next_kernel_begin();
  if (threadIdx.x == 0) {
    marked = 0;
    if (blockIdx.x == 0) *params.header = Header{};
  }
  const PrepassChunk chunk(params, static_cast<int32_t>(blockIdx.x), 0, params.positions);
  // The first maximum's barriers stand between the zero above and the counting.
  float largest_key;
  bool shifted = false;
  if (params.shift != nullptr) {
    float c = 0;
    largest_key = 0;
    const Span span = span_of<kPadded>(params.operand[0], chunk);
    if (threadIdx.x < kPadded) {
      c = shift_of(span, params.operand[0].rows.dtype, largest_key);
      shifts[threadIdx.x] = params.shift[chunk.head * kPadded + threadIdx.x] = c;
    }
    shifted = __syncthreads_or(c != 0);
    largest_key = block_max(largest_key);
  } else {
    largest_key = largest_of(params.operand[0], chunk);
  }
  const float* const shift = shifted ? shifts : nullptr;
  const float largest_norm = block_max(copy_chunk<kPadded>(params.operand[0], chunk, largest_key, shift, &marked));
  const float largest_value = largest_of(params.operand[1], chunk);
  copy_chunk<kPadded>(params.operand[1], chunk, largest_value, nullptr, &marked);
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
    return launch(kernel, int64_t{params.head_count}, kPrepassThreads, 0, stream, "the pre-pass over keys and values",
                  params);
  }
  const dim3 grid(static_cast<unsigned>(prepass_chunks(params.positions) * params.head_count), 2);
  if (grid.x == 0) {
    const auto bytes = reinterpret_cast<char*>(params.chunk_maxima) - reinterpret_cast<char*>(params.header);
    return to_status(cudaMemsetAsync(params.header, 0, static_cast<size_t>(bytes), stream), "clearing the counters");
  }
  const bool narrow = params.padded == 64;
  LLA_RETURN_IF_ERROR(launch(narrow ? largest_kernel<64> : largest_kernel<128>, grid, kPrepassThreads, 0, stream,
                             "the pre-pass's largest elements", params));
  if (params.shift != nullptr) {
    LLA_RETURN_IF_ERROR(launch_early(narrow ? shift_kernel<64> : shift_kernel<128>,
                                     dim3(static_cast<unsigned>(params.head_count)), params.padded, 0, stream,
                                     "the pre-pass's shift of keys", params));
  }
  return launch_early(narrow ? copy_kernel<64> : copy_kernel<128>, grid, kPrepassThreads, 0, stream,
                      "the pre-pass over keys and values", params);
}

}  // namespace lla::cuda::tensor
