// Local Linear Attention for C++ programs that use libtorch: functions with gradients over the operators lla::forward
// and lla::backward, or lla::inference where no gradient is wanted. Header only, compiled against your own torch; link
// (or dlopen) liblla_torch, which registers the operators.
//
//     at::Tensor o = lla::torch::attention(q, k, v, ridge);            // (B, L, H, D), differentiable
//     o.sum().backward();
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lla::torch {

// How a pass solved its rows: (B, Hq, Lq), packed (Hq, total_q). iterations and residual are -1 where a row was solved
// directly; status holds lla_row_status.
struct RowInfo : ::torch::CustomClassHolder {
  at::Tensor iterations, residual, status;
};
inline c10::intrusive_ptr<RowInfo> make_row_info() { return c10::make_intrusive<RowInfo>(); }

// The options of lla.h; what is not given has its default there.
struct Options {
  std::optional<double> scale;  // of the logits, 1/sqrt(D) unless given
  bool causal = true;
  int64_t window_left = -1;
  int64_t window_right = -1;
  std::optional<double> tol;
  int64_t max_iterations = 0;  // 0: the default
  std::string solver = "auto";
  std::optional<std::string> implementation;
  bool tf32 = false;  // f32 tensors may be rounded to TF32, which lets the tensor cores take them
  bool batch_invariant = false;
  // Filled where given (make_row_info): by the call, and by its backward pass.
  c10::intrusive_ptr<RowInfo> info, backward_info;
};

// Packed sequences: int32 (sequences + 1), as for lla_attention_varlen in Python.
struct Packing {
  at::Tensor cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
};

namespace detail {

using MaybeTensor = std::optional<at::Tensor>;
using MaybeText = std::optional<c10::string_view>;
using ForwardSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
    const MaybeTensor&, c10::SymInt, c10::SymInt, std::optional<double>, bool, c10::SymInt, c10::SymInt,
    std::optional<double>, int64_t, c10::string_view, MaybeText, bool, bool, const MaybeTensor&, const MaybeTensor&,
    const MaybeTensor&, c10::SymInt, bool, bool);
using InferenceSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&,
                                      const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, c10::SymInt,
                                      c10::SymInt, std::optional<double>, bool, c10::SymInt, c10::SymInt,
                                      std::optional<double>, int64_t, c10::string_view, MaybeText, bool, bool,
                                      const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, c10::SymInt);
using BackwardSignature = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&, const MaybeTensor&,
    const at::Tensor&, const MaybeTensor&, const MaybeTensor&, c10::SymInt, c10::SymInt, std::optional<double>, bool,
    c10::SymInt, c10::SymInt, std::optional<double>, int64_t, c10::string_view, MaybeText, bool, bool, bool, bool, bool,
    bool, bool);

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline MaybeTensor maybe(const at::Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; }
// From the operators' one tensor of rows.
inline void put_rows(const at::Tensor& rows, const at::Tensor& q, RowInfo& to) {
  std::vector<int64_t> size;
  if (q.dim() == 4) size.push_back(q.size(0));
  size.insert(size.end(), {q.size(-2), q.size(-3)});
  to.iterations = rows[0].view(size);
  to.residual = rows[1].view(at::kFloat).view(size);
  to.status = rows[2].view(size);
}
inline MaybeText text(const std::optional<std::string>& value) { return value ? MaybeText(*value) : std::nullopt; }

class Attention : public ::torch::autograd::Function<Attention> {
 public:
  // Exactly one of ridge and x is given.
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const MaybeTensor& ridge, const MaybeTensor& x, const Packing& packing,
                            const Options& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find<ForwardSignature>("lla::forward");
    auto [o, saved, row_info] =
        op.call(q, k, v, ridge, x, maybe(packing.cu_seqlens_q), maybe(packing.cu_seqlens_k), packing.max_seqlen_q,
                packing.max_seqlen_k, options.scale, options.causal, options.window_left, options.window_right,
                options.tol, options.max_iterations, options.solver, text(options.implementation), options.tf32,
                options.batch_invariant, {}, {}, {}, 0, /*save=*/true,
                /*info=*/options.info.defined());
    if (options.info) put_rows(row_info, q, *options.info);
    context->save_for_backward({q, k, v, ridge.value_or(at::Tensor()), x.value_or(at::Tensor()), packing.cu_seqlens_q,
                                packing.cu_seqlens_k, saved});
    context->saved_data["lengths"] = std::vector<int64_t>{packing.max_seqlen_q, packing.max_seqlen_k};
    context->saved_data["window"] = std::vector<int64_t>{options.window_left, options.window_right};
    context->saved_data["scale"] = options.scale;
    context->saved_data["causal"] = options.causal;
    context->saved_data["tol"] = options.tol;
    context->saved_data["max_iterations"] = options.max_iterations;
    context->saved_data["solver"] = options.solver;
    context->saved_data["implementation"] = options.implementation;
    context->saved_data["tf32"] = options.tf32;
    context->saved_data["batch_invariant"] = options.batch_invariant;
    if (options.backward_info) {
      context->saved_data["info"] = c10::IValue::make_capsule(options.backward_info);
    }
    return o;
  }

  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   const ::torch::autograd::variable_list& grads) {
    TORCH_CHECK(!c10::GradMode::is_enabled(), "lla: second derivatives are not implemented (double backward)");
    static const auto op = find<BackwardSignature>("lla::backward");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto lengths = data["lengths"].toIntVector(), window = data["window"].toIntVector();
    const std::string solver = data["solver"].toStringRef();
    const auto implementation = data["implementation"].toOptional<std::string>();
    const bool ridge = saved[3].defined();
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool info = data.find("info") != data.end();
    auto [dq, dk, dv, dlast, rows] = op.call(
        grads[0].contiguous(), saved[0], saved[1], saved[2], maybe(saved[3]), maybe(saved[4]), saved[7],
        maybe(saved[5]), maybe(saved[6]), lengths[0], lengths[1], data["scale"].toOptional<double>(),
        data["causal"].toBool(), window[0], window[1], data["tol"].toOptional<double>(), data["max_iterations"].toInt(),
        solver, text(implementation), data["tf32"].toBool(), data["batch_invariant"].toBool(),
        context->needs_input_grad(0), context->needs_input_grad(1), context->needs_input_grad(2),
        context->needs_input_grad(3),  // the fourth tensor given: ridge or x
        info);
    if (info) put_rows(rows, saved[0], static_cast<RowInfo&>(*data["info"].toCapsule()));
    const auto wanted = [&](size_t input, at::Tensor grad) {
      return context->needs_input_grad(input) ? grad : at::Tensor();
    };
    return {wanted(0, dq),
            wanted(1, dk),
            wanted(2, dv),
            ridge ? wanted(3, dlast) : at::Tensor(),
            ridge ? at::Tensor() : wanted(3, dlast),
            at::Tensor(),
            at::Tensor()};
  }
};

// Keeps what the backward pass needs only where there will be one.
inline at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const MaybeTensor& ridge,
                         const MaybeTensor& x, const Packing& packing, const Options& options) {
  const auto learned = [](const MaybeTensor& tensor) { return tensor && tensor->requires_grad(); };
  if (c10::GradMode::is_enabled() && (learned(q) || learned(k) || learned(v) || learned(ridge) || learned(x))) {
    return Attention::apply(q, k, v, ridge, x, packing, options);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  if (options.info) {
    static const auto op = find<ForwardSignature>("lla::forward");
    auto [o, saved, rows] =
        op.call(q, k, v, ridge, x, maybe(packing.cu_seqlens_q), maybe(packing.cu_seqlens_k), packing.max_seqlen_q,
                packing.max_seqlen_k, options.scale, options.causal, options.window_left, options.window_right,
                options.tol, options.max_iterations, options.solver, text(options.implementation), options.tf32,
                options.batch_invariant, {}, {}, {}, 0, /*save=*/false, /*info=*/true);
    put_rows(rows, q, *options.info);
    return o;
  }
  static const auto op = find<InferenceSignature>("lla::inference");
  return op.call(q, k, v, ridge, x, maybe(packing.cu_seqlens_q), maybe(packing.cu_seqlens_k), packing.max_seqlen_q,
                 packing.max_seqlen_k, options.scale, options.causal, options.window_left, options.window_right,
                 options.tol, options.max_iterations, options.solver, text(options.implementation), options.tf32,
                 options.batch_invariant, {}, {}, {}, 0);
}

}  // namespace detail

// q (B, Lq, Hq, D), k (B, Lk, Hkv, D), v (B, Lk, Hkv, Dv); ridge f32 (f64 for f64 q): (), (Hq), (B, Lq, Hq) or (B, Lq,
// Hq, D).
inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& ridge,
                            const Options& options = {}) {
  return detail::attend(q, k, v, ridge, std::nullopt, Packing{}, options);
}

// Sequences packed one after the other: q (total_q, Hq, D) and so on.
inline at::Tensor attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& ridge, const Packing& packing, const Options& options = {}) {
  return detail::attend(q, k, v, ridge, std::nullopt, packing, options);
}

// A given x (B, Lq, Hq, D) instead of a solve.
inline at::Tensor parallax_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& x,
                                     const Options& options = {}) {
  return detail::attend(q, k, v, std::nullopt, x, Packing{}, options);
}

}  // namespace lla::torch
