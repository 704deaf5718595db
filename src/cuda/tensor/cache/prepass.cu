// One kernel finds every sequence's place; then largest elements, shifts and copies as in prepass.cu, over as many
// chunks as are alive: the grids do not depend on the lengths, so that a captured graph replays at any.
#include "cuda/tensor/cache/prepass.hpp"

#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/tensor/prepass.cuh"

namespace lla::cuda::tensor {
namespace {

constexpr int kPlaceThreads = 1024;
// Blocks that share the chunks: a little more than a GPU holds at once.
constexpr int64_t kChunkBlocks = 1024;

// ---- places --------------------------------------------------------------------------------------------------------

// Over the threads up to this one, in their order; `memory` has an element for each.
template <class Join>
__device__ int64_t scan(int64_t x, int64_t* memory, Join join) {
  const int t = threadIdx.x;
  memory[t] = x;
  __syncthreads();
  for (int by = 1; by < blockDim.x; by *= 2) {
    const int64_t below = t >= by ? memory[t - by] : x;
    __syncthreads();
    if (t >= by) memory[t] = x = join(below, x);
    __syncthreads();
  }
  return x;
}

__device__ void store_spans(const CachePrepassParams& params, int64_t b, const SequencePlace& place) {
  const int64_t batch = params.source.problem.batch;
  Shape window;
  window.left = params.left, window.right = params.right;
  const bool few = most_keys(window, {0, place.keys}) <= params.few_keys;
#pragma unroll
  for (int list = 0; list < kSpanLists; ++list) {
    const SequenceSpans spans = spans_of(place, few == (list == 1));
    *reinterpret_cast<int2*>(list_of_spans(params.spans, batch, list, false) + 2 * b) =
        make_int2(spans.rows[0], spans.rows[1]);
    *reinterpret_cast<int2*>(list_of_spans(params.spans, batch, list, true) + 2 * b) =
        make_int2(spans.keys[0], spans.keys[1]);
  }
}

// One block.
__global__ void __launch_bounds__(kPlaceThreads) places_kernel(const __grid_constant__ CachePrepassParams params) {
  __shared__ int64_t memory[kPlaceThreads];
  __shared__ int32_t live;
  if (threadIdx.x == 0) live = 0;
  if (threadIdx.x < kSpanLists) params.to.header[threadIdx.x] = Header{};
  const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const auto sum = [](int64_t a, int64_t b) { return a + b; };
  int64_t claimed = 0, keys = 0, chunks = 0;  // of the sequences of earlier rounds
  for (int64_t first = 0; first < params.source.problem.batch; first += blockDim.x) {
    const int32_t b = static_cast<int32_t>(first) + static_cast<int32_t>(threadIdx.x);
    const bool there = b < params.source.problem.batch;
    scan(there ? params.source.claimed(b) : 0, memory, larger);
    const int64_t claimed_before = threadIdx.x == 0 ? claimed : larger(claimed, memory[threadIdx.x - 1]);
    claimed = larger(claimed, memory[blockDim.x - 1]);
    SequencePlace place = there ? find_place(params.source, b, claimed_before) : SequencePlace{};
    __syncthreads();
    const int64_t keys_upto = keys + scan(place.keys, memory, sum);
    keys += memory[blockDim.x - 1];
    __syncthreads();
    const int64_t chunks_before = chunks + scan(place.chunks, memory, sum) - place.chunks;
    chunks += memory[blockDim.x - 1];
    settle_place(place, chunks_before, keys_upto, params.source.most_keys);
    if (place.state == kTaken) atomicMax(&live, place.first_chunk + place.chunks);
    if (there) {
      params.places[b] = place;
      store_spans(params, b, place);
    }
    __syncthreads();
  }
  __syncthreads();
  if (threadIdx.x == 0) *params.live_chunks = live;
}

// ---- chunks ---------------------------------------------------------------------------------------------------------

// A chunk of a sequence's keys or values, of one head.
struct CacheChunk {
  static constexpr bool kMayMiss = true;
  static constexpr int32_t first_of(int32_t chunk) { return chunk * kPrepassRows; }

  const core::KeyCache& cache;
  int32_t* state;
  int64_t copy_begin;  // of position 0
  int32_t batch, head;
  int32_t first, last, used;
  int32_t begin;  // position 0 in the sequence, or in the packed tensor

  __device__ __forceinline__ const void* row(const PrepassOperand& operand, int32_t position) const {
    const uint32_t key = static_cast<uint32_t>(begin) + static_cast<uint32_t>(position);
    if (cache.table == nullptr) return row_pointer(operand.rows, cache ? batch : 0, key, head);
    // Pages longer than what a sequence can have hold it whole.
    const uint32_t page_size = static_cast<uint32_t>(min(cache.page_size, int64_t{1} << 31));
    const uint32_t entry = key / page_size;
    const int32_t page = __ldg(cache.table + batch * cache.table_stride + entry);
    if (!cache.has_page(page)) {
      *state = kInvalid;
      return nullptr;
    }
    return row_pointer(operand.rows, page, key - entry * page_size, head);
  }
  __device__ __forceinline__ int64_t copy_row(int32_t position) const { return copy_begin + position; }
};

// Which sequence a chunk belongs to; -1: it is the one behind the last, which tiles reach into. All threads.
__device__ __forceinline__ int32_t sequence_of_chunk(const CachePrepassParams& params, int32_t chunk) {
  __shared__ int32_t found;
  __syncthreads();
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int32_t b = threadIdx.x; b < params.source.problem.batch; b += blockDim.x) {
    const int32_t from = params.places[b].first_chunk;
    if (chunk >= from && chunk < from + params.places[b].chunks) found = b;
  }
  __syncthreads();
  return found;
}

__device__ __forceinline__ CacheChunk chunk_at(const CachePrepassParams& params, int32_t sequence, int32_t chunk,
                                               int32_t head) {
  const int64_t head_begin = int64_t{head} * params.to.positions;
  if (sequence < 0)
    return {params.source.cache, nullptr, head_begin + CacheChunk::first_of(chunk), 0, head, 0, kPrepassRows, 0, 0};
  SequencePlace& place = params.places[sequence];
  const int32_t first = CacheChunk::first_of(chunk - place.first_chunk);
  return {params.source.cache,
          &place.state,
          head_begin + CacheChunk::first_of(place.first_chunk),
          sequence,
          head,
          first,
          first + kPrepassRows,
          place.keys,
          place.first_key};
}

// Calls f(sequence, head, unit, chunk) for this block's share of the chunks of all heads.
template <class F>
__device__ __forceinline__ void for_each_chunk(const CachePrepassParams& params, int32_t chunks, F f) {
  const uint32_t heads = static_cast<uint32_t>(params.to.heads_kv), units = static_cast<uint32_t>(chunks) * heads;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int32_t chunk = static_cast<int32_t>(unit / heads), head = static_cast<int32_t>(unit % heads);
    const int32_t sequence = sequence_of_chunk(params, chunk);
    f(sequence, head, unit, chunk_at(params, sequence, chunk, head));
  }
}

// As in prepass.cu; what belongs to a (chunk, head) lies at its unit, what belongs to a head at (sequence, head).
template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads) largest_kernel(const __grid_constant__ CachePrepassParams params) {
  let_next_kernel_begin();
  wait_for_last_kernel();
  const PrepassOperand& operand = params.to.operand[blockIdx.y];
  for_each_chunk(params, *params.live_chunks,
                 [&](int32_t sequence, int32_t head, int64_t unit, const CacheChunk& chunk) {
                   if (operand.keys && params.to.shift != nullptr) {
                     const Span span = span_of<kPadded>(operand, chunk);
                     float* const to = params.to.chunk_bounds + unit * 2 * kPadded + threadIdx.x;
                     if (threadIdx.x < kPadded) to[0] = span.least, to[kPadded] = span.largest;
                   } else {
                     const float largest = largest_of(operand, chunk);
                     if (threadIdx.x == 0) params.to.chunk_maxima[2 * unit + blockIdx.y] = largest;
                   }
                   if (threadIdx.x == 0 && chunk.first == 0 && blockIdx.y == 0)
                     params.to.heads[sequence * params.to.heads_kv + head] = {};
                 });
}

// A block for every (sequence, head).
template <int kPadded>
__global__ void __launch_bounds__(kPadded) shift_kernel(const __grid_constant__ CachePrepassParams params) {
  let_next_kernel_begin();
  wait_for_last_kernel();
  const int64_t heads = params.to.heads_kv, at = blockIdx.x;
  const SequencePlace place = params.places[at / heads];
  if (place.chunks == 0) return;
  const float* from = params.to.chunk_bounds + (place.first_chunk * heads + at % heads) * 2 * kPadded + threadIdx.x;
  Span span;
  for (int32_t i = 0; i < place.chunks; ++i, from += heads * 2 * kPadded) span.join({from[0], from[kPadded]});
  find_shift<kPadded>(params.to, static_cast<uint32_t>(at), span);
}

template <int kPadded>
__global__ void __launch_bounds__(kPrepassThreads) copy_kernel(const __grid_constant__ CachePrepassParams params) {
  let_next_kernel_begin();
  wait_for_last_kernel();
  const PrepassOperand& operand = params.to.operand[blockIdx.y];
  const int32_t live = *params.live_chunks;
  for_each_chunk(
      params, live > 0 ? live + 1 : 0, [&](int32_t sequence, int32_t head, int64_t, const CacheChunk& chunk) {
        if (sequence < 0) {
          __shared__ uint32_t none;  // zeros are ordinary
          copy_chunk<kPadded>(operand, chunk, 0, nullptr, &none);
          return;
        }
        const SequencePlace& place = params.places[sequence];
        const int64_t stride = 2 * int64_t{params.to.heads_kv};
        const float* const maxima = params.to.chunk_maxima + place.first_chunk * stride + 2 * head + blockIdx.y;
        copy_with_statistics<kPadded>(params.to, operand, chunk, sequence * params.to.heads_kv + head, maxima,
                                      place.chunks, stride);
      });
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// A block for every sequence; nearly all have nothing to do.
__global__ void __launch_bounds__(kPrepassThreads) invalid_kernel(const __grid_constant__ CachePrepassParams params) {
  const SequencePlace place = params.places[blockIdx.x];
  if (place.state != kInvalid) return;
  const core::Problem& problem = params.source.problem;
  const core::Sequence s{blockIdx.x, place.start_q, 0, place.length_q, 0};
  const int64_t rows = place.length_q * problem.heads_q, batch = problem.packed ? 0 : blockIdx.x;
  for (int64_t r = threadIdx.x / 32; r < rows; r += kPrepassThreads / 32) {
    const int64_t i = r / problem.heads_q, head = r % problem.heads_q;
    const int64_t to = batch * params.o.stride[0] + (s.start_q + i) * params.o.stride[1] + head * params.o.stride[2];
    for (int64_t c = threadIdx.x % 32; c < problem.value_dim; c += 32) {
      store_as(params.o.data, params.o.dtype, to + c * params.o.stride[3], __int_as_float(0x7fffffff));
    }
    if (threadIdx.x % 32 != 0) continue;
    const int64_t row = core::row_index(problem, s, head, i);
    if (params.info.iterations) params.info.iterations[row] = -1;
    if (params.info.residual) params.info.residual[row] = -1;
    if (params.info.status) params.info.status[row] = LLA_ROW_INVALID;
  }
}

}  // namespace

Status run_cache_prepass(const CachePrepassParams& params, cudaStream_t stream) {
  const int64_t batch = params.source.problem.batch;
  const int threads = static_cast<int>(std::clamp<int64_t>((batch + 31) / 32 * 32, 32, kPlaceThreads));
  LLA_RETURN_IF_ERROR(
      launch(places_kernel, dim3(1), threads, 0, stream, "finding the places of sequences of a cache", params));
  const int64_t units = int64_t{params.most_chunks} * params.to.heads_kv;
  const dim3 grid(static_cast<unsigned>(std::min(units, kChunkBlocks)), 2);
  const bool narrow = params.to.padded == 64;
  LLA_RETURN_IF_ERROR(launch_early(narrow ? largest_kernel<64> : largest_kernel<128>, grid, kPrepassThreads, 0, stream,
                                   "the pre-pass's largest elements of a cache", params));
  if (params.to.shift != nullptr) {
    LLA_RETURN_IF_ERROR(launch_early(narrow ? shift_kernel<64> : shift_kernel<128>,
                                     dim3(static_cast<unsigned>(batch * params.to.heads_kv)), params.to.padded, 0,
                                     stream, "the pre-pass's shift of keys of a cache", params));
  }
  return launch_early(narrow ? copy_kernel<64> : copy_kernel<128>, grid, kPrepassThreads, 0, stream,
                      "the pre-pass over a cache", params);
}

Status overwrite_invalid_rows(const CachePrepassParams& params, cudaStream_t stream) {
  return launch(invalid_kernel, params.source.problem.batch, kPrepassThreads, 0, stream,
                "overwriting the rows of invalid sequences", params);
}

}  // namespace lla::cuda::tensor
