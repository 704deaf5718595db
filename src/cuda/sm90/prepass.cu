// Two small kernels, both bound by memory: the largest finite magnitude of every head, then the scaled copies; one
// kernel for both where heads are short. A row with a non-finite element is written as zeros and marked: it cannot
// disturb anyone who does not see it, and the forward kernel makes the rows that do see it NaN.
#include "cuda/common/launch.cuh"
#include "cuda/sm90/prepass.hpp"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/scale.hpp"

namespace lla::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

struct Part {
  int32_t head, first, last;  // positions [first, last) of a head
};

__device__ __forceinline__ uint32_t parts_of(const PrepassParams& p) {
  return static_cast<uint32_t>(prepass_parts(p.positions));
}
__device__ __forceinline__ Part part_of_block(const PrepassParams& p) {
  const uint32_t parts = parts_of(p), head = blockIdx.x / parts;
  const int32_t first = static_cast<int32_t>(blockIdx.x - head * parts) * kPrepassRows;
  return {static_cast<int32_t>(head), first, min(first + kPrepassRows, p.positions)};
}

// Positions that belong to a sequence. Those behind the last one may hold anything, and must not set a head's scale.
__device__ __forceinline__ int32_t used_positions(const PrepassParams& p) {
  return p.end != nullptr ? min(*p.end, p.positions) : p.positions;
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

// Largest finite magnitude of a part, in every thread.
__device__ __forceinline__ float largest_of(const PrepassParams& p, const PrepassOperand& operand, const Part& part) {
  const int eights = operand.dim / 8;
  const int batch = part.head / p.heads_kv, head = part.head % p.heads_kv;
  const int32_t last = min(part.last, used_positions(p));
  float largest = 0;
  for (int i = threadIdx.x; i < (last - part.first) * eights; i += kThreads) {
    float x[8];
    load_eight(x, row_pointer(operand.rows, batch, part.first + i / eights, head), i % eights * 8, operand.rows);
    for (int j = 0; j < 8; ++j) largest = finite(x[j]) ? fmaxf(largest, fabsf(x[j])) : largest;
  }
  return block_max(largest);
}

// Writes the scaled copy of a part, marks its bad rows and counts them in `bad_rows`. Returns the largest squared norm
// among the rows this thread took part in.
template <int kPadded>
__device__ __forceinline__ float copy_part(const PrepassParams& p, const PrepassOperand& operand, const Part& part,
                                           float largest, uint32_t* bad_rows) {
  constexpr int kLanes = kPadded / 8;  // threads of a row
  const int batch = part.head / p.heads_kv, head = part.head % p.heads_kv;
  const float scale = power_of_two_scale(largest);
  const int lane = threadIdx.x % kLanes;
  const int64_t first_row = int64_t{part.head} * p.positions;
  const int32_t used = used_positions(p);
  float largest_norm = 0;
  for (int r = threadIdx.x / kLanes; r < kPrepassRows; r += kThreads / kLanes) {
    const int position = part.first + r;
    const bool here = position < part.last;
    float x[8] = {};
    if (here && position < used && lane * 8 < operand.dim) {
      load_eight(x, row_pointer(operand.rows, batch, position, head), lane * 8, operand.rows);
    }
    bool bad = false;
    for (int j = 0; j < 8; ++j) bad |= !finite(x[j]);
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
    for (int mask = kLanes / 2; mask > 0; mask /= 2) norm += __shfl_xor_sync(0xffffffffu, norm, mask);
    largest_norm = fmaxf(largest_norm, norm);
    if (!here) continue;
    *reinterpret_cast<uint4*>(operand.copy + (first_row + position) * kPadded + lane * 8) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (lane == 0) {
      operand.bad[first_row + position] = bad;
      if (bad) atomicAdd(bad_rows, 1u);
    }
  }
  return largest_norm;
}

// A little more than the rounded root, so that it stays a bound.
__device__ __forceinline__ uint32_t norm_bound(float largest_squared) {
  return __float_as_uint(sqrtf(largest_squared) * 1.0001f);
}

// The largest of every part, which the copying kernel puts together: nothing need be cleared before. What that one
// counts up is cleared here.
__global__ void __launch_bounds__(kThreads) largest_kernel(const __grid_constant__ PrepassParams p) {
  let_next_kernel_begin();
  const Part part = part_of_block(p);
  const float largest = largest_of(p, p.operand[blockIdx.y], part);
  if (threadIdx.x != 0) return;
  p.part_maxima[2 * int64_t{blockIdx.x} + blockIdx.y] = largest;
  if (part.first != 0 || blockIdx.y != 0) return;
  p.heads[part.head] = {};
  if (part.head == 0) *p.header = Header{};
}

template <int kPadded>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ PrepassParams p) {
  let_next_kernel_begin();
  const PrepassOperand& operand = p.operand[blockIdx.y];
  const Part part = part_of_block(p);
  const uint32_t parts = parts_of(p);
  const float* const maxima = p.part_maxima + 2 * int64_t{part.head} * parts + blockIdx.y;
  wait_for_last_kernel();
  float largest = 0;
  for (uint32_t i = threadIdx.x; i < parts; i += kThreads) largest = fmaxf(largest, maxima[2 * int64_t{i}]);
  largest = block_max(largest);
  HeadStatistics& statistics = p.heads[part.head];
  if (part.first == 0 && threadIdx.x == 0) {
    (operand.keys ? statistics.largest_key : statistics.largest_value) = __float_as_uint(largest);
  }
  float largest_norm = copy_part<kPadded>(p, operand, part, largest, &statistics.bad_keys);
  if (!operand.keys) return;
  largest_norm = block_max(largest_norm);
  if (threadIdx.x == 0) atomicMax(&statistics.largest_norm, norm_bound(largest_norm));
}

// Everything for heads that one block can take: nothing need be cleared before it.
template <int kPadded>
__global__ void __launch_bounds__(kThreads) whole_heads_kernel(const __grid_constant__ PrepassParams p) {
  __shared__ uint32_t bad_rows;
  let_next_kernel_begin();
  if (threadIdx.x == 0) {
    bad_rows = 0;
    if (blockIdx.x == 0) *p.header = Header{};
  }
  const Part part{static_cast<int32_t>(blockIdx.x), 0, p.positions};
  // The first maximum's barriers stand between the zero above and the counting.
  const float largest_key = largest_of(p, p.operand[0], part);
  const float largest_norm = block_max(copy_part<kPadded>(p, p.operand[0], part, largest_key, &bad_rows));
  const float largest_value = largest_of(p, p.operand[1], part);
  copy_part<kPadded>(p, p.operand[1], part, largest_value, &bad_rows);
  __syncthreads();
  if (threadIdx.x == 0) {
    p.heads[part.head] = {__float_as_uint(largest_key), __float_as_uint(largest_value), norm_bound(largest_norm),
                          bad_rows};
  }
}

}  // namespace

Status run_prepass(const PrepassParams& params, cudaStream_t stream) {
  if (params.positions <= kPrepassRows && params.head_count > 0) {
    const auto kernel = params.padded == 64 ? whole_heads_kernel<64> : whole_heads_kernel<128>;
    return launch(kernel, int64_t{params.head_count}, kThreads, 0, stream, "the pre-pass over keys and values", params);
  }
  const dim3 grid(static_cast<unsigned>(prepass_parts(params.positions) * params.head_count), 2);
  if (grid.x == 0) {
    const auto bytes = reinterpret_cast<char*>(params.part_maxima) - reinterpret_cast<char*>(params.header);
    return to_status(cudaMemsetAsync(params.header, 0, static_cast<size_t>(bytes), stream), "clearing the counters");
  }
  LLA_RETURN_IF_ERROR(launch(largest_kernel, grid, kThreads, 0, stream, "the pre-pass's largest elements", params));
  return launch_early(params.padded == 64 ? copy_kernel<64> : copy_kernel<128>, grid, kThreads, 0, stream,
                      "the pre-pass over keys and values", params);
}

}  // namespace lla::cuda::sm90
