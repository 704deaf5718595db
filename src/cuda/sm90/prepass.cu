// Small kernels, bound by memory: the largest finite magnitude of every head (of keys that may be shifted: the least
// and largest along every axis, from which a kernel between them makes c), then the scaled copies; one kernel for all
// where heads are short. A row with a non-finite element is written as zeros and marked: it cannot
// disturb anyone who does not see it, and the forward kernel makes the rows that do see it NaN. A row so small that
// fp16 loses digits is marked, too: who sees it says so.
#include "cuda/common/launch.cuh"
#include "cuda/sm90/prepass.cuh"

namespace lla::cuda::sm90 {
namespace {

// A part of a dense or packed head.
struct PrepassPart {
  static constexpr bool kMayMiss = false;
  int32_t head, first, last;  // positions [first, last) of a head
  int32_t used, positions;
  int32_t batch, head_in_batch;

  __device__ __forceinline__ PrepassPart(const PrepassParams& p, int32_t of_head, int32_t from, int32_t to)
      : head(of_head),
        first(from),
        last(to),
        // Positions that belong to a sequence. Those behind the last one may hold anything, and must not set a head's
        // scale.
        used(p.end != nullptr ? min(*p.end, p.positions) : p.positions),
        positions(p.positions),
        batch(of_head / p.heads_kv),
        head_in_batch(of_head % p.heads_kv) {}
  __device__ __forceinline__ const void* row(const PrepassOperand& operand, int32_t position) const {
    return row_pointer(operand.rows, batch, position, head_in_batch);
  }
  __device__ __forceinline__ int64_t copy_row(int32_t position) const { return int64_t{head} * positions + position; }
};

__device__ __forceinline__ uint32_t parts_of(const PrepassParams& p) {
  return static_cast<uint32_t>(prepass_parts(p.positions));
}
__device__ __forceinline__ PrepassPart part_of_block(const PrepassParams& p) {
  const uint32_t parts = parts_of(p), head = blockIdx.x / parts;
  const int32_t first = static_cast<int32_t>(blockIdx.x - head * parts) * kPrepassRows;
  return {p, static_cast<int32_t>(head), first, min(first + kPrepassRows, p.positions)};
}

// The largest of every part, which the copying kernel puts together: nothing need be cleared before. What that one
// counts up is cleared here.
template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads) largest_kernel(const __grid_constant__ PrepassParams p) {
  let_next_kernel_begin();
  const PrepassPart part = part_of_block(p);
  const PrepassOperand& operand = p.operand[blockIdx.y];
  if (operand.keys && p.shift != nullptr) {
    const Span span = span_of<kPadded>(operand, part);
    float* const to = p.part_bounds + int64_t{blockIdx.x} * 2 * kPadded + threadIdx.x;
    if (threadIdx.x < kPadded) to[0] = span.least, to[kPadded] = span.largest;
  } else {
    const float largest = largest_of(operand, part);
    if (threadIdx.x == 0) p.part_maxima[2 * int64_t{blockIdx.x} + blockIdx.y] = largest;
  }
  if (threadIdx.x != 0 || part.first != 0 || blockIdx.y != 0) return;
  p.heads[part.head] = {};
  if (part.head == 0) *p.header = Header{};
}

// A block for every head: c, and the scale of k - c.
template <int kPadded>
__global__ void __launch_bounds__(kPadded) shift_kernel(const __grid_constant__ PrepassParams p) {
  let_next_kernel_begin();
  const uint32_t parts = parts_of(p), head = blockIdx.x;
  const float* from = p.part_bounds + int64_t{head} * parts * 2 * kPadded + threadIdx.x;
  wait_for_last_kernel();
  Span span;
  for (uint32_t i = 0; i < parts; ++i, from += 2 * kPadded) span.join({from[0], from[kPadded]});
  find_shift<kPadded>(p, head, span);
}

template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads) copy_kernel(const __grid_constant__ PrepassParams p) {
  let_next_kernel_begin();
  const PrepassOperand& operand = p.operand[blockIdx.y];
  const PrepassPart part = part_of_block(p);
  const uint32_t parts = parts_of(p);
  const float* const maxima = p.part_maxima + 2 * int64_t{part.head} * parts + blockIdx.y;
  wait_for_last_kernel();
  copy_with_statistics<kPadded>(p, operand, part, part.head, maxima, parts, 2);
}

// Everything for heads that one block can take: nothing need be cleared before it.
template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads) whole_heads_kernel(const __grid_constant__ PrepassParams p) {
  __shared__ uint32_t marked;
  __shared__ float shifts[kPadded];
  let_next_kernel_begin();
  if (threadIdx.x == 0) {
    marked = 0;
    if (blockIdx.x == 0) *p.header = Header{};
  }
  const PrepassPart part(p, static_cast<int32_t>(blockIdx.x), 0, p.positions);
  // The first maximum's barriers stand between the zero above and the counting.
  float largest_key;
  bool shifted = false;
  if (p.shift != nullptr) {
    float c = 0;
    largest_key = 0;
    const Span span = span_of<kPadded>(p.operand[0], part);
    if (threadIdx.x < kPadded) {
      c = shift_of(span, p.operand[0].rows.dtype, largest_key);
      shifts[threadIdx.x] = p.shift[part.head * kPadded + threadIdx.x] = c;
    }
    shifted = __syncthreads_or(c != 0);
    largest_key = block_max(largest_key);
  } else {
    largest_key = largest_of(p.operand[0], part);
  }
  const float* const shift = shifted ? shifts : nullptr;
  const float largest_norm = block_max(copy_part<kPadded>(p.operand[0], part, largest_key, shift, &marked));
  const float largest_value = largest_of(p.operand[1], part);
  copy_part<kPadded>(p.operand[1], part, largest_value, nullptr, &marked);
  __syncthreads();
  if (threadIdx.x == 0) {
    p.heads[part.head] = {__float_as_uint(largest_key), __float_as_uint(largest_value), norm_bound(largest_norm),
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
  const dim3 grid(static_cast<unsigned>(prepass_parts(params.positions) * params.head_count), 2);
  if (grid.x == 0) {
    const auto bytes = reinterpret_cast<char*>(params.part_maxima) - reinterpret_cast<char*>(params.header);
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

}  // namespace lla::cuda::sm90
