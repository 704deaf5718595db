// Checks of what says where sequences begin and end: cu_seqlens, and the lengths and pages of a cache.
#pragma once

#include "validate/tensor_checks.hpp"

namespace lla::core {

struct PackingArgs {
  const Tensor &q, &cu_seqlens_q, &cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
};
// Batch and longest lengths of packed tensors whose totals are known.
Status read_packing(const PackingArgs& a, Pointers pointers, Problem& p);

// One side of it: its checks, and the longest length by `bound` (0: unknown) or the total.
struct Bound {
  const char* name;
  int64_t value;
};
Status read_cu_seqlens(const NamedTensor& cu, const Bound& bound, const Tensor& q, Pointers pointers, int64_t total,
                       int64_t& longest);

// Contents of cu_seqlens where the host can read them. `longest` bounds each sequence.
Status check_cu_seqlens(const NamedTensor& cu, int64_t total, const char* longest_name, int64_t longest);

// Batch, bounds and the cache of a call whose heads, dimensions and (packed) rows are known.
Status read_cache(const lla_forward_args& a, Pointers pointers, ForwardCall& call);
// Shape of k or v as a cache; `keys` is k, whose first two sizes count.
Status check_cache(const NamedTensor& t, const Tensor& keys, int64_t channels, const char* channel_name, bool paged);
// The pages of a cache (B, capacity, ...) or (pages, page_size, ...) and how many keys a sequence may have there.
Status read_pages(const NamedTensor& keys, const NamedTensor& table, int64_t batch, Pointers pointers, KeyCache& cache,
                  int64_t& capacity);
// Lengths and pages, where the host can read them; the mask must be known.
Status check_cache_contents(const ForwardCall& call);
// The pages of keys [begin, end) of sequence b.
Status check_pages(const KeyCache& cache, int64_t b, int64_t begin, int64_t end);

}  // namespace lla::core
