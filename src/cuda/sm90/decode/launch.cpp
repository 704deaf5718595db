#include "cuda/sm90/decode/launch.hpp"

#include <algorithm>
#include <numeric>

#include "core/text.hpp"
#include "cuda/sm90/tensor_map.hpp"

namespace lla::cuda::sm90::decode {
namespace {

// Whether the copy engine takes it.
bool in_vectors(const core::Operand& t) {
  bool good = t.stride[3] == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i < 3; ++i) good = good && t.stride[i] > 0 && t.stride[i] % 8 == 0 && t.stride[i] < int64_t{1} << 38;
  return good;
}

}  // namespace

Status describe_cache(Params& p, int most_keys) {
  Cache& cache = p.cache;
  const int64_t slots = cache.table ? cache.page_size : std::max(p.max_length, 1);
  const int64_t heads = p.heads_q / p.group;
  cache.box = cache.table ? std::gcd(static_cast<int>(cache.page_size), kAlign) : most_keys;
  cache.vectors = cache.pages > 0 && in_vectors(cache.k) && in_vectors(cache.v);
  if (!cache.vectors) return {};
  LLA_RETURN_IF_ERROR(make_cache_map(p.key_map, cache.k, {cache.pages, slots, heads, p.dim}, cache.box));
  return make_cache_map(p.value_map, cache.v, {cache.pages, slots, heads, p.value_dim}, cache.box);
}

template <int kDim>
static Status launch_in(const Launch& call) {
  switch (call.form) {
    case Form::solved: return call.bf16 ? launch_solved<kDim, true>(call) : launch_solved<kDim, false>(call);
    case Form::moments: return launch_moments<kDim>(call);
    case Form::given_x:
    case Form::bundles: return call.bf16 ? launch_given_x<kDim, true>(call) : launch_given_x<kDim, false>(call);
  }
  return {};
}

Status launch(const Launch& call) {
  if (call.rows == 0) return {};
  return call.dim == 64 ? launch_in<64>(call) : launch_in<128>(call);
}

Status launch_short(const Params& p, int dim, int cluster, cudaStream_t stream) {
  return dim == 64 ? launch_short<64>(p, cluster, stream) : launch_short<128>(p, cluster, stream);
}

}  // namespace lla::cuda::sm90::decode
