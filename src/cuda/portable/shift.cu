// Before the first pass: what is taken off the keys of every head (core/key_shift.hpp), and, after the forward, what
// that makes of the saved vector.
#include "core/key_shift.hpp"
#include "cuda/portable/launch.cuh"

namespace lla::cuda::portable {
namespace {

constexpr int kThreads = kLargestDim;  // one for a channel

// A block for every key head of every sequence. A key that is not finite, or not there, is passed over.
template <class T>
__global__ void __launch_bounds__(kThreads) shift_kernel(const __grid_constant__ Arguments<T> a) {
  const core::Problem& p = a.problem;
  const int64_t number = blockIdx.x / p.heads_kv, kv_head = blockIdx.x % p.heads_kv;
  const core::Sequence sequence = sequence_of(a, number);
  const core::KeyRange seen = core::visible_keys(p.mask, sequence);
  const int64_t keys = sequence.valid ? seen.end - seen.begin : 0, sample = min(core::kShiftSample, keys);
  const int c = static_cast<int>(threadIdx.x);
  core::ShiftSums sums;
  for (int64_t i = 0; i < sample; ++i) {
    const int64_t j = core::shift_sample(seen.begin, keys, i, sample);
    const bool here = a.cache.page_size == 0 || a.cache.has_page(a.cache.page(sequence.batch, j));
    double key = 0;
    if (here && c < p.dim) {
      key = load_as<double>(a.k.data, a.k.dtype, key_offset(a, a.k, sequence, kv_head, j) + c * a.k.stride[3]);
    }
    if (!__syncthreads_or(!here || !isfinite(key))) sums.add(key);
  }
  if (c < p.dim) shift_of(a, number, kv_head)[c] = sums.shift<T>();
}

// q . shift in the logits' units joins the maximum as far as it is whole, omega with the rest.
template <class T, int kDim>
__global__ void __launch_bounds__(Config<T, kDim>::kThreads) unshift_kernel(const __grid_constant__ Arguments<T> a) {
  using C = Config<T, kDim>;
  const core::Problem& p = a.problem;
  const QueryBlock block = query_block(a, blockIdx.x, C::kOwn);
  const T* const shift = shift_of(a, block.number, block.head / p.group());
#pragma unroll
  for (int r = 0; r < C::kRows; ++r) {
    const Query q = owned_query<C>(p, block, r);
    const int32_t kind = q.exists ? a.rows.kind[q.row] : static_cast<int32_t>(kEmpty);
    const bool seen = is_regular(kind) || kind == kSingle;
    double offset = 0;
    if (seen) {
      const int64_t query = row_offset(a.q, block.sequence, block.head, q.index);
      for_columns<C>(p.dim, [&](int, int, int column) {
        a.rows.mean_k[q.row * p.dim + column] += shift[column];
        offset += load_as<double>(a.q.data, a.q.dtype, query + column * a.q.stride[3]) * shift[column];
      });
    }
    offset = row_sum(offset) * p.scale * std::numbers::log2e;
    if (!seen || lane() != 0 || offset == 0) continue;
    a.rows.max[q.row] += static_cast<T>(ceil(offset));
    a.rows.omega[q.row] *= static_cast<T>(exp2(offset - ceil(offset)));
  }
}

}  // namespace

template <class T>
Status launch_shift(const Arguments<T>& a, cudaStream_t stream) {
  return launch(shift_kernel<T>, a.problem.batch * a.problem.heads_kv, kThreads, 0, stream,
                "launching the kernel that shifts the keys", a);
}

template <class T>
Status launch_unshift(const Arguments<T>& a, cudaStream_t stream) {
  return launch_tiles<0, 0>(a, a.problem.seqlen_q, a.problem.heads_q, stream,
                            "launching the kernel that finishes the saved statistics",
                            [](auto bucket) { return unshift_kernel<T, bucket.value>; });
}

template Status launch_shift<float>(const Arguments<float>&, cudaStream_t);
template Status launch_shift<double>(const Arguments<double>&, cudaStream_t);
template Status launch_unshift<float>(const Arguments<float>&, cudaStream_t);
template Status launch_unshift<double>(const Arguments<double>&, cudaStream_t);

}  // namespace lla::cuda::portable
