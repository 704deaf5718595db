// A backward call: what is launched, in which order, on which memory. Everything goes to the caller's stream; nothing
// waits.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "cuda/common/runtime.hpp"
#include "cuda/sm90/backward/key_pass.hpp"
#include "cuda/sm90/backward/row_pass.hpp"
#include "cuda/sm90/backward/solve.hpp"
#include "cuda/sm90/backward/workspace.hpp"
#include "cuda/sm90/plan.hpp"
#include "cuda/sm90/sm90.hpp"
#include "cuda/sm90/solve/config.hpp"
#include "cuda/sm90/tensor_map.hpp"
#include "cuda/tensor/backward/operands.hpp"
#include "cuda/tensor/operand_rows.hpp"
#include "cuda/tensor/prepass.hpp"

namespace lla::cuda::sm90 {
namespace {

// One call's pointers and sizes, then its launches in order.
struct BackwardLaunch {
  const core::BackwardCall& call;
  const core::Plan& plan;
  const core::Problem& p = call.problem;
  const Shape shape = shape_of(p);
  const BackwardLayout layout = backward_layout(p, plan.workers, plan.cached_weights);
  const int padded = padded_dim(p.dim, p.value_dim);
  const core::SavedLayout saved{p};
  const cudaStream_t stream = static_cast<cudaStream_t>(call.stream);

  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(call.workspace) + offset);
  }
  // Of the saved vector, which nobody writes to: rows of any kind have one description.
  float* section(int64_t offset) const { return const_cast<float*>(static_cast<const float*>(call.saved)) + offset; }
  int64_t key_heads() const { return (p.packed ? 1 : p.batch) * p.heads_kv; }
  int64_t keys_per_head() const { return p.packed ? p.total_k : p.seqlen_k; }

  Status clear_bounds() const {
    return to_status(cudaMemsetAsync(at<char>(layout.bounds), 0, layout.bounds_bytes, stream),
                     "clearing the workspace");
  }

  Status copy_keys_and_values() const {
    PrepassParams params{};
    params.operand[0] = {rows_of(call.k), static_cast<int32_t>(p.dim), at<uint16_t>(layout.forward.keys),
                         at<uint8_t>(layout.forward.key_marks), true};
    params.operand[1] = {rows_of(call.v), static_cast<int32_t>(p.value_dim), at<uint16_t>(layout.forward.values),
                         at<uint8_t>(layout.forward.value_marks), false};
    params.header = at<Header>(layout.forward.header);
    params.heads = at<HeadStatistics>(layout.forward.head_statistics);
    params.chunk_maxima = at<float>(layout.forward.chunk_maxima);
    params.chunk_bounds = at<float>(layout.forward.chunk_bounds);
    params.shift = p.given_x() ? nullptr : at<float>(layout.forward.key_shift);
    params.head_count = static_cast<int32_t>(key_heads());
    params.heads_kv = static_cast<int32_t>(p.heads_kv);
    params.positions = static_cast<int32_t>(keys_per_head());
    params.end = p.packed ? call.cu_seqlens_k + p.batch : nullptr;
    params.padded = padded;
    return run_prepass(params, stream);
  }

  Status make_key_maps(CUtensorMap& keys, CUtensorMap& values, int box_rows) const {
    const int64_t rows = std::max<int64_t>(key_heads() * keys_per_head(), 1);  // a map of nothing is an error
    LLA_RETURN_IF_ERROR(make_tensor_map(keys, at<void>(layout.forward.keys), rows, padded, box_rows));
    return make_tensor_map(values, at<void>(layout.forward.values), rows, padded, box_rows);
  }

  Status make_query_maps(CUtensorMap (&maps)[kQueryOperands]) const {
    for (int i = 0; i < kQueryOperands; ++i) {
      LLA_RETURN_IF_ERROR(
          make_tensor_map(maps[i], at<void>(layout.operand[i]), std::max<int64_t>(p.rows(), 1), padded, 64));
    }
    return {};
  }

  Status solve_rows() const {
    SolveParams params{};
    params.shape = solve_shape_of(p);
    params.dim = static_cast<int32_t>(p.dim);
    params.value_dim = static_cast<int32_t>(p.value_dim);
    params.heads_kv = static_cast<int32_t>(p.heads_kv);
    params.q = rows_of(call.q);
    params.ridge = ridge_of(call.ridge, p.ridge);
    params.saved = {section(saved.max), section(saved.omega), section(saved.mean_k), section(saved.mean_v),
                    section(saved.x)};
    params.info = call.info;
    params.cu_q = call.cu_seqlens_q, params.cu_k = call.cu_seqlens_k;
    params.scale_log2 = scale_log2(p.scale);
    params.negative_scale = p.scale < 0;
    const SolveLimits limits = solve_limits(p);
    params.tolerance_squared = static_cast<float>(limits.tolerance * limits.tolerance);
    params.few_keys_tolerance_squared = static_cast<float>(limits.few_keys_tolerance * limits.few_keys_tolerance);
    params.most_told = most_told(p.tolerance);
    params.few_keys_iterations = limits.few_keys_iterations;
    params.two_part_passes = limits.two_part_passes;
    params.share_squared = static_cast<float>(limits.share * limits.share);
    params.least_squared = static_cast<float>(limits.least * limits.least);
    params.max_iterations = std::min(p.max_iterations, kMostIterations);
    params.header = at<Header>(layout.forward.header);
    params.heads = at<HeadStatistics>(layout.forward.head_statistics);
    params.key_shift = at<float>(layout.forward.key_shift);
    params.key_marks = at<uint8_t>(layout.forward.key_marks),
    params.value_marks = at<uint8_t>(layout.forward.value_marks);
    params.scratch = at<float>(layout.forward.scratch);
    params.scratch_stride = layout.forward.scratch_stride / 4;
    params.weights = at<uint4>(layout.forward.weights);
    params.weights_stride = layout.forward.weights_stride / static_cast<int64_t>(sizeof(uint4));
    params.items = shape.items(static_cast<int>(plan.block_rows));
    params.g = rows_of(call.grad_o);
    params.y = at<float>(layout.y);
    params.starts = at<RowStart>(layout.starts), params.sizes = at<RowSizes>(layout.sizes);
    params.bounds = at<HeadBounds>(layout.bounds);
    params.low_parts = LowParts::of(p.tolerance);
    CUtensorMap keys, values;
    LLA_RETURN_IF_ERROR(make_key_maps(keys, values, tile_keys(padded)));
    const auto launch = padded == 64 ? (plan.cached_weights ? launch_solve<64, true> : launch_solve<64, false>)
                                     : (plan.cached_weights ? launch_solve<128, true> : launch_solve<128, false>);
    return launch(keys, values, params, plan.workers, stream);
  }

  Status make_operands() const {
    OperandParams params{};
    params.shape = shape;
    params.cu_q = call.cu_seqlens_q, params.cu_k = call.cu_seqlens_k;
    params.heads_kv = static_cast<int32_t>(p.heads_kv);
    params.dim = static_cast<int32_t>(p.dim), params.value_dim = static_cast<int32_t>(p.value_dim),
    params.padded = padded;
    params.scale = static_cast<float>(p.scale);
    params.q = rows_of(call.q), params.g = rows_of(call.grad_o);
    params.x = p.given_x() ? rows_of(call.x) : saved_rows(shape, section(saved.x), p.dim);
    if (!p.given_x()) params.y = saved_rows(shape, at<float>(layout.y), padded);
    params.mean_k = saved_rows(shape, section(saved.mean_k), p.dim);
    params.mean_v = saved_rows(shape, section(saved.mean_v), p.value_dim);
    params.max = section(saved.max), params.omega = section(saved.omega);
    params.sizes = at<RowSizes>(layout.sizes);
    params.heads = at<HeadStatistics>(layout.forward.head_statistics);
    params.key_shift = at<float>(layout.forward.key_shift);
    params.bounds = at<HeadBounds>(layout.bounds);
    params.head_exponents = at<int32_t>(layout.head_exponents);
    for (int i = 0; i < kQueryOperands; ++i) params.operand[i] = at<uint16_t>(layout.operand[i]);
    params.low = at<uint32_t>(layout.low);
    params.rows = at<RowConstants>(layout.rows);
    params.units = at<RowUnits>(layout.units);
    if (p.given_x()) params.info = call.info;
    params.ridge = p.ridge;
    const bool summed = p.ridge == core::RidgeShape::scalar || p.ridge == core::RidgeShape::head;
    if (call.dridge) {
      if (summed) {
        params.ridge_sums = at<double>(layout.ridge_sums);
      } else {
        params.dridge = static_cast<float*>(call.dridge.data);
      }
      params.dridge_batch = call.dridge.stride[0], params.dridge_position = call.dridge.stride[1];
      params.dridge_head = call.dridge.stride[2], params.dridge_dim = call.dridge.stride[3];
    }
    if (p.given_x()) {
      LLA_RETURN_IF_ERROR(run_sizes(params, stream));
    }
    LLA_RETURN_IF_ERROR(run_operands(params, stream));
    if (!call.dridge || !summed) return {};
    const RidgeSumParams sums{at<double>(layout.ridge_sums),
                              static_cast<float*>(call.dridge.data),
                              call.dridge.stride[2],
                              (p.seqlen_q + kOperandRows - 1) / kOperandRows,
                              shape.batch,
                              shape.heads_q,
                              p.ridge == core::RidgeShape::head};
    return run_ridge_sum(sums, stream);
  }

  Status run_row_pass() const {
    RowPassParams params{};
    LLA_RETURN_IF_ERROR(make_key_maps(params.keys, params.values, 64));
    LLA_RETURN_IF_ERROR(make_query_maps(params.queries));
    params.shape = shape;
    params.cu_q = call.cu_seqlens_q, params.cu_k = call.cu_seqlens_k;
    params.heads_kv = static_cast<int32_t>(p.heads_kv), params.dim = static_cast<int32_t>(p.dim);
    params.q = at<uint16_t>(layout.operand[kOpQ]);
    params.low = at<uint32_t>(layout.low);
    params.rows = at<RowConstants>(layout.rows);
    params.units = at<RowUnits>(layout.units);
    params.heads = at<HeadStatistics>(layout.forward.head_statistics);
    params.key_shift = at<float>(layout.forward.key_shift);
    params.mean_k = section(saved.mean_k);
    params.y = at<float>(layout.y);
    params.dq = rows_of(call.dq), params.dx = rows_of(call.dx);
    const auto launch = padded == 64 ? (p.given_x() ? launch_row_pass<64, false> : launch_row_pass<64, true>)
                                     : (p.given_x() ? launch_row_pass<128, false> : launch_row_pass<128, true>);
    return launch(params, stream);
  }

  Status run_key_pass() const {
    KeyPassParams params{};
    LLA_RETURN_IF_ERROR(make_key_maps(params.keys, params.values, 64));
    LLA_RETURN_IF_ERROR(make_query_maps(params.queries));
    LLA_RETURN_IF_ERROR(make_record_map(params.constants, at<void>(layout.rows), std::max<int64_t>(p.rows(), 1), 64));
    params.shape = shape;
    params.cu_q = call.cu_seqlens_q, params.cu_k = call.cu_seqlens_k;
    params.heads_kv = static_cast<int32_t>(p.heads_kv);
    params.dim = static_cast<int32_t>(p.dim), params.value_dim = static_cast<int32_t>(p.value_dim);
    params.heads_together = heads_together(p);
    params.low = at<uint32_t>(layout.low);
    params.head_exponents = at<int32_t>(layout.head_exponents);
    params.dk = rows_of(call.dk), params.dv = rows_of(call.dv);
    const auto launch = padded == 64 ? (p.given_x() ? launch_key_pass<64, false> : launch_key_pass<64, true>)
                                     : (p.given_x() ? launch_key_pass<128, false> : launch_key_pass<128, true>);
    return launch(params, stream);
  }

  Status run() const {
    LLA_RETURN_IF_ERROR(clear_bounds());
    LLA_RETURN_IF_ERROR(copy_keys_and_values());
    if (!p.given_x() && p.rows() > 0) {
      LLA_RETURN_IF_ERROR(solve_rows());
    }
    LLA_RETURN_IF_ERROR(make_operands());
    if (call.dq || call.dx || call.dk) {  // dk needs the row pass for the constants it corrects
      LLA_RETURN_IF_ERROR(run_row_pass());
    }
    return call.dk || call.dv ? run_key_pass() : Status{};
  }
};

}  // namespace

Status backward(const core::BackwardCall& call, const core::Plan& plan) {
  const DeviceGuard guard(call.problem.device_index);
  LLA_RETURN_IF_ERROR(guard.status());
  LLA_RETURN_IF_ERROR(check_pointers(call));
  return BackwardLaunch{call, plan}.run();
}

}  // namespace lla::cuda::sm90
