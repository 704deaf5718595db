#include "cuda/sm90/decode/decode.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/text.hpp"
#include "cuda/common/runtime.hpp"
#include "cuda/sm90/decode/launch.hpp"
#include "cuda/sm90/decode/schedule.hpp"
#include "cuda/tensor/cache_parts.hpp"

namespace lla::cuda::sm90::decode {
namespace {

using core::Problem;

Params params_of(const core::ForwardCall& call) {
  const Problem& p = call.problem;
  Params out{};
  out.cache.k = call.k, out.cache.v = call.v;
  out.lengths = call.cache.lengths, out.first_key = call.cache.first_key;
  out.cache.table = call.cache.table, out.cache.table_stride = call.cache.table_stride;
  out.max_length = static_cast<int32_t>(call.cache.max_length);
  out.cache.page_size = static_cast<int32_t>(std::min(call.cache.page_size, kLargestLength));
  // Tables count in 32 bits: what is behind the largest of them no entry reaches.
  out.cache.pages = static_cast<int32_t>(std::min<int64_t>(call.cache.pages, std::numeric_limits<int32_t>::max()));
  out.q = call.q, out.o = call.o, out.ridge = call.ridge, out.x = call.x;
  out.cu_q = p.packed ? call.cu_seqlens_q : nullptr;
  out.info = call.info;
  out.batch = static_cast<int32_t>(p.batch), out.heads_q = static_cast<int32_t>(p.heads_q);
  out.group = static_cast<int32_t>(p.group());
  out.seqlen_q = static_cast<int32_t>(p.seqlen_q), out.total_q = static_cast<int32_t>(p.total_q);
  out.dim = static_cast<int32_t>(p.dim), out.value_dim = static_cast<int32_t>(p.value_dim);
  out.left = static_cast<int32_t>(std::min(p.mask.left, kLargestLength));
  out.right = static_cast<int32_t>(std::min(p.mask.right, kLargestLength));
  // A zero scale means equal weights; the smallest one keeps masked logits (-inf times it) at -inf.
  const float half = std::max(static_cast<float>(0.5 * std::abs(p.scale) * std::numbers::log2e), 1e-37f);
  out.half_scale = p.scale < 0 ? -half : half;
  out.most_rows = has_forward_part(p) ? static_cast<int32_t>(most_rows(p)) : std::numeric_limits<int32_t>::max();
  out.decide_by_live_rows = has_forward_part(p);
  out.eliminate = p.solver == Solver::direct;
  return out;
}

}  // namespace

Status forward(const core::ForwardCall& call, const core::Plan& plan) {
  const Problem& p = call.problem;
  Params params = params_of(call);
  params.multiprocessors = plan.workers;
  if (const ShortCaches caches = short_caches(p, plan.workers); caches.cluster > 0) {
    params.short_keys = caches.keys;
    LLA_RETURN_IF_ERROR(describe_cache(params, kAlign));
    LLA_RETURN_IF_ERROR(launch_short(params, kernel_dim(p), caches.cluster, static_cast<cudaStream_t>(call.stream)));
    if (params.max_length <= caches.keys) return {};
  }
  const auto run = [&](Form form) -> Status {
    LLA_RETURN_IF_ERROR(describe_cache(params, box_keys(form, kernel_dim(p))));
    params.bundle = bundle_of(form, kernel_dim(p));
    return decode::launch({form, params, most_bundles(p, form), kernel_dim(p), p.dtype == DType::bf16, plan.workers,
                           rows_sharing_keys(p), pieces_of_rows(p), rows_are_alone(p), call.workspace,
                           static_cast<cudaStream_t>(call.stream)});
  };
  const Form form = form_of(p);
  if (form != Form::moments) return run(form);
  const Workspace at = workspace(p, plan.workers);
  const auto floats_at = [&](int64_t byte) {
    return reinterpret_cast<float*>(static_cast<std::byte*>(call.workspace) + byte);
  };
  params.solved_x = floats_at(at.x), params.solved_terms = floats_at(at.terms);
  LLA_RETURN_IF_ERROR(run(form));
  return run(Form::bundles);
}

}  // namespace lla::cuda::sm90::decode
