// A forward call: pre-pass, then the kernel the plan chose. Everything goes to the caller's stream; nothing waits.
#include "core/text.hpp"
#include "cuda/common/runtime.hpp"
#include "cuda/sm90/decode/decode.hpp"
#include "cuda/sm90/forward/launch.hpp"
#include "cuda/sm90/given_x/launch.hpp"
#include "cuda/sm90/plan.hpp"
#include "cuda/sm90/sm90.hpp"
#include "cuda/sm90/tensor_map.hpp"
#include "cuda/tensor/cache/prepass.hpp"
#include "cuda/tensor/operand_rows.hpp"
#include "cuda/tensor/prepass.hpp"

namespace lla::cuda::sm90 {
namespace {

using core::ForwardCall;
using core::Operand;
using core::Problem;

Saved saved_of(const ForwardCall& call) {
  if (call.saved == nullptr) return {};
  const core::SavedLayout at(call.problem);
  float* const base = static_cast<float*>(call.saved);
  return {base + at.max, base + at.omega, base + at.mean_k, base + at.mean_v, base + at.x};
}

ForwardParams params_of(const ForwardCall& call, const core::Plan& plan, const WorkspaceLayout& at) {
  const Problem& p = call.problem;
  std::byte* const base = static_cast<std::byte*>(call.workspace);
  ForwardParams out{};
  out.shape = p.given_x() ? shape_of(p) : solve_shape_of(p);
  out.dim = static_cast<int32_t>(p.dim);
  out.value_dim = static_cast<int32_t>(p.value_dim);
  out.heads_kv = static_cast<int32_t>(p.heads_kv);
  out.q = rows_of(call.q);
  out.o = rows_of(call.o);
  if (p.given_x()) {
    out.x = rows_of(call.x);
  } else {
    out.ridge = ridge_of(call.ridge, p.ridge);
  }
  out.saved = saved_of(call);
  out.info = call.info;
  out.cu_q = call.cu_seqlens_q;
  out.cu_k = call.cu_seqlens_k;
  out.scale_log2 = scale_log2(p.scale);
  out.negative_scale = p.scale < 0;
  const SolveLimits limits = solve_limits(p);
  out.tolerance_squared = static_cast<float>(limits.tolerance * limits.tolerance);
  out.few_keys_tolerance_squared = static_cast<float>(limits.few_keys_tolerance * limits.few_keys_tolerance);
  out.most_told = most_told(p.tolerance);
  out.max_iterations = std::min(p.max_iterations, kMostIterations);
  out.share_squared = static_cast<float>(limits.share * limits.share);
  out.least_squared = static_cast<float>(limits.least * limits.least);
  out.low_parts = LowParts::of(p.tolerance);
  out.sum_error = static_cast<float>(limits.sum_error);
  out.header = reinterpret_cast<Header*>(base + at.header);
  out.heads = reinterpret_cast<const HeadStatistics*>(base + at.head_statistics);
  out.key_shift = reinterpret_cast<const float*>(base + at.key_shift);
  out.key_marks = reinterpret_cast<const uint8_t*>(base + at.key_marks);
  out.value_marks = reinterpret_cast<const uint8_t*>(base + at.value_marks);
  out.scratch = reinterpret_cast<float*>(base + at.scratch);
  out.scratch_stride = at.scratch_stride / 4;
  out.weights = reinterpret_cast<uint4*>(base + at.weights);
  out.weights_stride = at.weights_stride / 16;
  out.items = out.shape.items(static_cast<int>(plan.block_rows));
  return out;
}

PrepassParams prepass_of(const ForwardCall& call, const WorkspaceLayout& at) {
  const Problem& p = call.problem;
  std::byte* const base = static_cast<std::byte*>(call.workspace);
  PrepassParams out{};
  out.operand[0] = {rows_of(call.k), static_cast<int32_t>(p.dim), reinterpret_cast<uint16_t*>(base + at.keys),
                    reinterpret_cast<uint8_t*>(base + at.key_marks), true};
  out.operand[1] = {rows_of(call.v), static_cast<int32_t>(p.value_dim), reinterpret_cast<uint16_t*>(base + at.values),
                    reinterpret_cast<uint8_t*>(base + at.value_marks), false};
  out.header = reinterpret_cast<Header*>(base + at.header);
  out.heads = reinterpret_cast<HeadStatistics*>(base + at.head_statistics);
  out.chunk_maxima = reinterpret_cast<float*>(base + at.chunk_maxima);
  out.chunk_bounds = reinterpret_cast<float*>(base + at.chunk_bounds);
  out.shift = p.given_x() ? nullptr : reinterpret_cast<float*>(base + at.key_shift);
  out.head_count = static_cast<int32_t>((has_own_spans(p) || p.packed ? 1 : p.batch) * p.heads_kv);
  out.heads_kv = static_cast<int32_t>(p.heads_kv);
  out.positions = static_cast<int32_t>(has_own_spans(p) ? own_positions(p) : p.packed ? p.total_k : p.seqlen_k);
  out.end = p.packed_keys() ? call.cu_seqlens_k + p.batch : nullptr;
  out.padded = padded_dim(p.dim, p.value_dim);
  return out;
}

CachePrepassParams cache_prepass_of(const ForwardCall& call, const core::Plan& plan, const PrepassParams& to,
                                    const WorkspaceLayout& at) {
  const Problem& p = call.problem;
  std::byte* const base = static_cast<std::byte*>(call.workspace);
  CachePrepassParams out{};
  out.to = to;
  out.source = {p, call.cache, call.cu_seqlens_q, call.cu_seqlens_k, most_own_keys(p)};
  out.places = reinterpret_cast<SequencePlace*>(base + at.places);
  out.live_chunks = reinterpret_cast<int32_t*>(base + at.live_chunks);
  out.spans = reinterpret_cast<int32_t*>(base + at.spans);
  const Shape shape = shape_of(p);
  const int64_t kept = keys_of_kept_weights(p, plan);
  out.few_keys = p.given_x() ? few_keys(to.padded) : kept > 0 ? static_cast<int32_t>(kept) : -1;
  // Weights are kept of a block's keys, which are more than a row's: there the window does not count.
  out.left = p.given_x() ? shape.left : -1, out.right = p.given_x() ? shape.right : -1;
  out.most_chunks = to.positions / kPrepassRows;
  out.o = call.o;
  out.info = call.info;
  return out;
}

template <int kDim>
auto given_x_launcher(const ForwardParams& p, bool few) {
  if (p.x.dtype == DType::f32) {
    return few ? launch_given_x<GivenXConfig<kDim, true, true>> : launch_given_x<GivenXConfig<kDim, true>>;
  }
  return few ? launch_given_x<GivenXConfig<kDim, false, true>> : launch_given_x<GivenXConfig<kDim, false>>;
}

// The kernels behind the pre-pass. With own spans the one for few keys and the one for many each take their list of
// sequences: with x given, and where only weights of few keys are kept.
Status launch_kernels(const ForwardCall& call, const core::Plan& plan, const PrepassParams& prepass,
                      const WorkspaceLayout& at) {
  const Problem& p = call.problem;
  const auto stream = static_cast<cudaStream_t>(call.stream);
  std::byte* const base = static_cast<std::byte*>(call.workspace);
  const int64_t key_rows = std::max<int64_t>(int64_t{prepass.head_count} * prepass.positions, 1);
  CUtensorMap keys, values;
  const int tile = plan.block_keys;
  LLA_RETURN_IF_ERROR(make_tensor_map(keys, base + at.keys, key_rows, prepass.padded, tile));
  LLA_RETURN_IF_ERROR(make_tensor_map(values, base + at.values, key_rows, prepass.padded, tile));
  ForwardParams params = params_of(call, plan, at);
  const auto use_list = [&](int list) {
    int32_t* const spans = reinterpret_cast<int32_t*>(base + at.spans);
    params.header = reinterpret_cast<Header*>(base + at.header) + list;
    params.cu_q = list_of_spans(spans, p.batch, list, false);
    params.cu_k = list_of_spans(spans, p.batch, list, true);
  };
  const auto launch = [&]<int kDim>(std::integral_constant<int, kDim>) -> Status {
    if (!p.given_x()) {
      const auto run = [&](bool cached) {
        return cached ? launch_forward<ForwardConfig<kDim, true>>(keys, values, params, plan.workers, stream)
                      : launch_forward<ForwardConfig<kDim, false>>(keys, values, params, plan.workers, stream);
      };
      if (keys_of_kept_weights(p, plan) > 0) {
        use_list(1);
        LLA_RETURN_IF_ERROR(run(true));
      }
      if (has_own_spans(p)) use_list(0);
      return run(plan.cached_weights);
    }
    const auto run = [&](bool few) {
      return given_x_launcher<kDim>(params, few)(keys, values, params, plan.workers, stream);
    };
    if (!has_own_spans(p)) return run(sees_few_keys(p));
    use_list(1);
    LLA_RETURN_IF_ERROR(run(true));
    if (sees_few_keys(p)) return {};
    use_list(0);
    return run(false);
  };
  return prepass.padded == 64 ? launch(std::integral_constant<int, 64>{}) : launch(std::integral_constant<int, 128>{});
}

}  // namespace

Status forward(const ForwardCall& call, const core::Plan& plan) {
  const Problem& p = call.problem;
  if (p.rows() == 0) return {};
  const DeviceGuard device(p.device_index);
  LLA_RETURN_IF_ERROR(device.status());
  LLA_RETURN_IF_ERROR(check_pointers(call));
  if (has_decode_part(p)) LLA_RETURN_IF_ERROR(decode::forward(call, plan));
  if (!has_forward_part(p)) return {};
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const WorkspaceLayout at = forward_layout(p, plan);
  const PrepassParams prepass = prepass_of(call, at);
  if (!has_own_spans(p)) {
    LLA_RETURN_IF_ERROR(run_prepass(prepass, stream));
    return launch_kernels(call, plan, prepass, at);
  }
  const CachePrepassParams cache = cache_prepass_of(call, plan, prepass, at);
  LLA_RETURN_IF_ERROR(run_cache_prepass(cache, stream));
  LLA_RETURN_IF_ERROR(launch_kernels(call, plan, prepass, at));
  return overwrite_invalid_rows(cache, stream);
}

}  // namespace lla::cuda::sm90
