#include "validate/validate.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <span>
#include <tuple>

#include "validate/overlap.hpp"
#include "validate/sequences.hpp"
#include "validate/tensor_checks.hpp"

namespace lla::core {
namespace {

// ---- options -------------------------------------------------------------------------------------------------------

Status read_options(const lla_options& o, Problem& p) {
  if (std::isinf(o.scale)) return invalid(cat("options.scale: ", o.scale, " is not finite"));
  if (o.tolerance < 0 || std::isinf(o.tolerance))
    return invalid(cat("options.tolerance: ", o.tolerance, " must be finite and at least 0, or NaN (the default)"));
  if (o.window_left < -1)
    return invalid(cat("options.window_left: ", o.window_left, " must be -1 (unbounded) or at least 0"));
  if (o.window_right < -1)
    return invalid(cat("options.window_right: ", o.window_right, " must be -1 (unbounded) or at least 0"));
  if (o.cached_weights_limit < 0)
    return invalid(cat("options.cached_weights_limit: ", o.cached_weights_limit, " must be at least 0"));
  if (o.causal != 0 && o.causal != 1) return invalid(cat("options.causal: ", o.causal, " must be 0 or 1"));
  if (o.max_iterations < 0)
    return invalid(cat("options.max_iterations: ", o.max_iterations, " must be at least 0 (0: the default)"));
  if (o.solver < LLA_SOLVER_AUTO || o.solver > LLA_SOLVER_DIRECT)
    return invalid(cat("options.solver: ", o.solver, " is not an lla_solver"));
  if (o.weights < LLA_WEIGHTS_AUTO || o.weights > LLA_WEIGHTS_CACHED)
    return invalid(cat("options.weights: ", o.weights, " is not an lla_weights"));
  if (o.precision < LLA_PRECISION_FULL || o.precision > LLA_PRECISION_TF32)
    return invalid(cat("options.precision: ", o.precision, " is not an lla_precision"));
  if (o.batch_invariant != 0 && o.batch_invariant != 1)
    return invalid(cat("options.batch_invariant: ", o.batch_invariant, " must be 0 or 1"));
  p.scale = std::isnan(o.scale) ? 1 / std::sqrt(static_cast<double>(p.dim)) : o.scale;
  const bool tf32 = p.dtype == DType::f32 && o.precision == LLA_PRECISION_TF32;  // has f16's digits
  p.tolerance = std::isnan(o.tolerance) ? default_tolerance(tf32 ? DType::f16 : p.dtype) : o.tolerance;
  // A window longer than the sequences reaches no further than they do; here, so that nobody's sums overflow.
  p.mask.left = std::min(o.window_left, p.seqlen_k);
  p.mask.right = o.causal ? 0 : std::min(o.window_right, p.seqlen_q);
  p.cached_weights_limit = o.cached_weights_limit;
  p.max_iterations = o.max_iterations > 0 ? o.max_iterations : default_max_iterations(p.dim);
  p.solver = static_cast<Solver>(o.solver);
  p.weights = static_cast<Weights>(o.weights);
  p.precision = static_cast<Precision>(o.precision);
  p.batch_invariant = o.batch_invariant != 0;
  return {};
}

// ---- views ---------------------------------------------------------------------------------------------------------

// (batch, position, head, channel) strides of a 4-d tensor, or of a packed 3-d one.
Operand operand(const Tensor& t) {
  Operand o{t.data, dtype_of(t), {0, 0, 0, 0}};
  if (present(t)) std::copy(t.stride, t.stride + t.ndim, o.stride + (4 - t.ndim));
  return o;
}

// ---- sizes ---------------------------------------------------------------------------------------------------------

// Every size the library works out is a small multiple (at most 2^20) of these products: held to these bounds, no sum
// or product overflows anywhere. Both are far beyond what memory can hold, but views with stride 0 and questions about
// sizes are not held by memory.
constexpr int64_t kMostElements = int64_t{1} << 42;  // of q, o and x together, or of k and v
constexpr int64_t kMostPairs = int64_t{1} << 56;     // sequences times heads times the longest length

bool within(int64_t limit, std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  return std::all_of(factors.begin(), factors.end(), [&](int64_t f) {
    return !__builtin_mul_overflow(product, std::max<int64_t>(f, 1), &product) && product <= limit;
  });
}

// Counted as if no dimension were zero: a zero in one place does not make the others harmless.
Status check_countable(const Problem& p) {
  const auto check = [&](const char* arg, bool packed, const char* names, int64_t length, int64_t total,
                         int64_t heads) -> Status {
    int64_t channels;
    const bool fits = !__builtin_add_overflow(p.dim, p.value_dim, &channels) &&
                      within(kMostElements, {packed ? 1 : p.batch, packed ? total : length, heads, channels}) &&
                      within(kMostPairs, {p.batch, length, heads});
    if (fits) return {};
    return invalid(cat(arg, ": sizes ", names, " = ", p.batch, ", ", packed ? total : length, ", ", heads, ", ", p.dim,
                       ", ", p.value_dim, " are too large: they multiply to more than 2^42 elements"));
  };
  LLA_RETURN_IF_ERROR(check("q", p.packed, p.packed ? "sequences, total_q, Hq, D, Dv" : "B, Lq, Hq, D, Dv", p.seqlen_q,
                            p.total_q, p.heads_q));
  return check("k", p.packed_keys(),
               p.cache    ? "B, longest, Hkv, D, Dv"
               : p.packed ? "sequences, total_k, Hkv, D, Dv"
                          : "B, Lk, Hkv, D, Dv",
               p.seqlen_k, p.total_k, p.heads_kv);
}

// ---- caches: the forward pass alone has them -----------------------------------------------------------------------

bool has_cache(const lla_forward_args& a) { return present(a.seqlens_k); }
constexpr bool has_cache(const lla_backward_args&) { return false; }
constexpr Status read_cache(const lla_backward_args&, Pointers, BackwardCall&) { return {}; }
int64_t bound_total(const lla_forward_args& a, int64_t all) {
  return a.max_total_k > 0 ? std::min(a.max_total_k, all) : all;
}
constexpr int64_t bound_total(const lla_backward_args&, int64_t all) { return all; }

// What says where a cache's keys are belongs to a cache.
Status check_no_cache(const lla_forward_args& a) {
  for (const NamedTensor& t : {NamedTensor{"page_table", a.page_table}, NamedTensor{"first_key", a.first_key}}) {
    if (present(t.tensor)) return invalid(cat(t.name, ": is given without seqlens_k, which makes k and v a cache"));
  }
  if (a.max_total_k == 0) return {};
  return invalid(cat("max_total_k: ", a.max_total_k, " is given without seqlens_k, which makes k and v a cache"));
}

// ---- what forward and backward share -------------------------------------------------------------------------------

// Shape of a per-query tensor with `channels` in the last dimension.
Status check_rows(const NamedTensor& t, const Problem& p, int64_t channels, const char* channel_name) {
  if (p.packed) return check_shape(t, {p.total_q, p.heads_q, channels}, "(total_q, Hq, ", channel_name, ")");
  return check_shape(t, {p.batch, p.seqlen_q, p.heads_q, channels}, "(B, Lq, Hq, ", channel_name, ")");
}

Status check_keys(const NamedTensor& t, const Problem& p, int64_t channels, const char* channel_name) {
  if (p.packed) return check_shape(t, {p.total_k, p.heads_kv, channels}, "(total_k, Hkv, ", channel_name, ")");
  return check_shape(t, {p.batch, p.seqlen_k, p.heads_kv, channels}, "(B, Lk, Hkv, ", channel_name, ")");
}

Status read_ridge(const Tensor& ridge, const Problem& p, RidgeShape& shape, Operand& out) {
  const NamedTensor arg{"ridge", ridge};
  if (p.dtype == DType::f64) {
    LLA_RETURN_IF_ERROR(check_dtype(arg, {DType::f32, DType::f64}, "f32 or f64 for f64 inputs"));
  } else {
    LLA_RETURN_IF_ERROR(check_dtype(arg, {DType::f32}, "f32 for ", name(p.dtype), " inputs"));
  }
  const int token_dims = p.packed ? 2 : 3;
  out = {ridge.data, dtype_of(ridge), {0, 0, 0, 0}};
  const auto is = [&](std::initializer_list<int64_t> s) {
    return ridge.ndim == static_cast<int>(s.size()) && std::equal(s.begin(), s.end(), ridge.size);
  };
  if (ridge.ndim == 0) {
    shape = RidgeShape::scalar;
  } else if (is({p.heads_q})) {
    shape = RidgeShape::head;
    out.stride[2] = ridge.stride[0];
  } else if (p.packed ? is({p.total_q, p.heads_q}) : is({p.batch, p.seqlen_q, p.heads_q})) {
    shape = RidgeShape::token;
    std::copy(ridge.stride, ridge.stride + token_dims, out.stride + (3 - token_dims));
  } else if (p.packed ? is({p.total_q, p.heads_q, p.dim}) : is({p.batch, p.seqlen_q, p.heads_q, p.dim})) {
    shape = RidgeShape::dimension;
    std::copy(ridge.stride, ridge.stride + token_dims + 1, out.stride + (3 - token_dims));
  } else {
    const std::string token =
        p.packed ? cat("(", p.total_q, ", ", p.heads_q) : cat("(", p.batch, ", ", p.seqlen_q, ", ", p.heads_q);
    return invalid(cat("ridge: shape is ", shape_text(ridge), ", must be (), (", p.heads_q, "), ", token, ") or ",
                       token, ", ", p.dim, ")"));
  }
  return {};
}

// Batch, lengths, heads and head dimensions: of dense tensors, packed ones, or queries over a cache.
template <class Args, class Call>
Status read_sizes(const Args& a, Pointers pointers, Call& call) {
  Problem& p = call.problem;
  p.packed = present(a.cu_seqlens_q) || present(a.cu_seqlens_k);
  const bool cache = has_cache(a);
  for (const NamedTensor& t : {NamedTensor{"q", a.q}, NamedTensor{"k", a.k}, NamedTensor{"v", a.v}}) {
    const bool packed = p.packed && !(cache && &t.tensor != &a.q);
    if (t.tensor.ndim == (packed ? 3 : 4)) continue;
    return invalid(cat(t.name, ": shape is ", shape_text(t.tensor), ", must have ",
                       packed  ? "3 dimensions (total, H, D) with cu_seqlens"
                       : cache ? "4 dimensions, (B, L, H, D) or in pages (pages, page_size, H, D)"
                               : "4 dimensions (B, L, H, D)"));
  }
  const int64_t* qs = a.q.size + (a.q.ndim - 3);  // position, head, channel
  const int64_t* ks = a.k.size + (a.k.ndim - 3);
  p.heads_q = qs[1];
  p.heads_kv = ks[1];
  p.dim = qs[2];
  p.value_dim = a.v.size[a.v.ndim - 1];
  if (p.packed) p.total_q = qs[0];
  if (cache) {
    LLA_RETURN_IF_ERROR(read_cache(a, pointers, call));
  } else if (p.packed) {
    p.total_k = ks[0];
    LLA_RETURN_IF_ERROR(
        read_packing({a.q, a.cu_seqlens_q, a.cu_seqlens_k, a.max_seqlen_q, a.max_seqlen_k}, pointers, p));
  } else {
    if (a.max_seqlen_q != 0 || a.max_seqlen_k != 0) {
      return invalid(cat("max_seqlen_",
                         a.max_seqlen_q != 0 ? "q: " : "k: ", a.max_seqlen_q != 0 ? a.max_seqlen_q : a.max_seqlen_k,
                         " is given without cu_seqlens; it belongs to packed sequences only"));
    }
    p.batch = a.q.size[0];
    p.seqlen_q = qs[0];
    p.seqlen_k = ks[0];
  }
  LLA_RETURN_IF_ERROR(check_countable(p));
  if (!p.packed) p.total_q = p.batch * p.seqlen_q;
  if (cache) {
    p.total_k = bound_total(a, p.batch * p.seqlen_k);
  } else if (!p.packed) {
    p.total_k = p.batch * p.seqlen_k;
  }
  return {};
}

// q, k and v are there, on one device, in one floating type.
template <class Args>
Status read_types(const Args& a, Pointers pointers, Problem& p) {
  const NamedTensor q{"q", a.q}, k{"k", a.k}, v{"v", a.v};
  for (const NamedTensor& t : {q, k, v}) {
    if (!present(t.tensor)) return invalid(cat(t.name, ": is absent"));
    LLA_RETURN_IF_ERROR(check_view(t, pointers));
    LLA_RETURN_IF_ERROR(same_device(t, a.q));
  }
  LLA_RETURN_IF_ERROR(check_dtype(q, {DType::f32, DType::f64, DType::bf16, DType::f16}, "f32, f64, bf16 or f16"));
  p.device = a.q.device_type == LLA_CPU ? Device::cpu : Device::cuda;
  p.device_index = a.q.device_index;
  p.dtype = p.out_dtype = dtype_of(a.q);
  LLA_RETURN_IF_ERROR(check_dtype(k, {p.dtype}, name(p.dtype), " like q"));
  return check_dtype(v, {p.dtype}, name(p.dtype), " like q");
}

// Shapes of k and v against the sizes that q, k and v gave.
template <class Args>
Status check_key_shapes(const Args& a, const Problem& p) {
  if (p.dim < 1) return invalid(cat("q: head dimension is ", p.dim, ", must be at least 1"));
  if (p.value_dim < 1) return invalid(cat("v: head dimension is ", p.value_dim, ", must be at least 1"));
  const NamedTensor k{"k", a.k}, v{"v", a.v};
  if (p.cache) {
    LLA_RETURN_IF_ERROR(check_cache(k, a.k, p.dim, "D", p.page_size > 0));
    LLA_RETURN_IF_ERROR(check_cache(v, a.k, p.value_dim, "Dv", p.page_size > 0));
  } else {
    LLA_RETURN_IF_ERROR(check_keys(k, p, p.dim, "D"));
    LLA_RETURN_IF_ERROR(check_keys(v, p, p.value_dim, "Dv"));
  }
  if ((p.heads_kv == 0) != (p.heads_q == 0) || (p.heads_kv > 0 && p.heads_q % p.heads_kv != 0)) {
    return invalid(
        cat("k: has ", p.heads_kv, " heads, but q has ", p.heads_q, ", which must be a multiple (and 0 only of 0)"));
  }
  return {};
}

// Exactly one of ridge and x.
template <class Args, class Call>
Status read_ridge_or_x(const Args& a, Pointers pointers, Call& call) {
  Problem& p = call.problem;
  if (present(a.ridge) == present(a.x)) {
    return invalid(present(a.ridge) ? "x: is given together with ridge; give exactly one"
                                    : "ridge: is absent, and so is x; give exactly one");
  }
  const NamedTensor given = present(a.ridge) ? NamedTensor{"ridge", a.ridge} : NamedTensor{"x", a.x};
  LLA_RETURN_IF_ERROR(check_view(given, pointers));
  LLA_RETURN_IF_ERROR(same_device(given, a.q));
  if (present(a.ridge)) return read_ridge(a.ridge, p, p.ridge, call.ridge);
  p.ridge = RidgeShape::none;
  LLA_RETURN_IF_ERROR(check_dtype(given, {p.dtype, DType::f32}, name(p.dtype), " like q, or f32"));
  return check_rows(given, p, p.dim, "D");
}

template <class Args, class Call>
Status read_inputs(const Args& a, Pointers pointers, Call& call) {
  LLA_RETURN_IF_ERROR(read_types(a, pointers, call.problem));
  LLA_RETURN_IF_ERROR(read_sizes(a, pointers, call));
  LLA_RETURN_IF_ERROR(check_key_shapes(a, call.problem));
  LLA_RETURN_IF_ERROR(read_options(*a.options, call.problem));
  LLA_RETURN_IF_ERROR(read_ridge_or_x(a, pointers, call));
  call.q = operand(a.q);
  call.k = operand(a.k);
  call.v = operand(a.v);
  call.x = operand(a.x);
  call.cu_seqlens_q = static_cast<const int32_t*>(a.cu_seqlens_q.data);
  call.cu_seqlens_k = static_cast<const int32_t*>(a.cu_seqlens_k.data);
  call.workspace = a.workspace;
  call.workspace_bytes = a.workspace_bytes;
  call.stream = a.stream;
  return {};
}

// An output, or an input of the backward pass, in q's dtype or f32.
Status check_float_tensor(const NamedTensor& t, const Problem& p, const Tensor& q, Pointers pointers) {
  LLA_RETURN_IF_ERROR(check_view(t, pointers));
  LLA_RETURN_IF_ERROR(same_device(t, q));
  if (p.dtype == DType::f64) return check_dtype(t, {DType::f64}, "f64 like q");
  return check_dtype(t, {p.dtype, DType::f32}, name(p.dtype), " like q, or f32");
}

template <class Args>
Status read_row_outputs(const Args& a, Pointers pointers, const Problem& p, RowOutputs& info) {
  for (const NamedTensor& t : {NamedTensor{"iterations", a.iterations}, NamedTensor{"residual", a.residual},
                               NamedTensor{"row_status", a.row_status}}) {
    if (!present(t.tensor)) continue;
    LLA_RETURN_IF_ERROR(check_view(t, pointers));
    LLA_RETURN_IF_ERROR(same_device(t, a.q));
    const DType dtype = &t.tensor == &a.residual ? DType::f32 : DType::i32;
    LLA_RETURN_IF_ERROR(check_dtype(t, {dtype}, name(dtype)));
    if (p.packed) {
      LLA_RETURN_IF_ERROR(check_shape(t, {p.heads_q, p.total_q}, "(Hq, total_q)"));
    } else {
      LLA_RETURN_IF_ERROR(check_shape(t, {p.batch, p.heads_q, p.seqlen_q}, "(B, Hq, Lq)"));
    }
    LLA_RETURN_IF_ERROR(check_contiguous(t));
  }
  info = {static_cast<int32_t*>(a.iterations.data), static_cast<float*>(a.residual.data),
          static_cast<int32_t*>(a.row_status.data)};
  return {};
}

Status check_saved(const Tensor& saved, const Tensor& q, const Problem& p, Pointers pointers) {
  const NamedTensor arg{"saved", saved};
  LLA_RETURN_IF_ERROR(check_view(arg, pointers));
  LLA_RETURN_IF_ERROR(same_device(arg, q));
  const DType dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  LLA_RETURN_IF_ERROR(check_dtype(arg, {dtype}, name(dtype), " for ", name(p.dtype), " inputs"));
  LLA_RETURN_IF_ERROR(check_shape(arg, {SavedLayout(p).size}, "(saved_elements)"));
  return check_contiguous(arg);
}

// ---- what is read and what is written ------------------------------------------------------------------------------

template <class... Arrays>
auto joined(const Arrays&... arrays) {
  return std::apply([](const auto&... tensors) { return std::array{tensors...}; }, std::tuple_cat(arrays...));
}

// What both calls read and what both may write, under the names of their arguments.
template <class Args>
auto shared_inputs(const Args& a) {
  return std::array{NamedTensor{"q", a.q},
                    NamedTensor{"k", a.k},
                    NamedTensor{"v", a.v},
                    NamedTensor{"ridge", a.ridge},
                    NamedTensor{"x", a.x},
                    NamedTensor{"cu_seqlens_q", a.cu_seqlens_q},
                    NamedTensor{"cu_seqlens_k", a.cu_seqlens_k}};
}
template <class Args>
auto row_outputs(const Args& a) {
  return std::array{NamedTensor{"iterations", a.iterations}, NamedTensor{"residual", a.residual},
                    NamedTensor{"row_status", a.row_status}};
}

auto inputs_of(const lla_forward_args& a) {
  return joined(shared_inputs(a),
                std::array{NamedTensor{"seqlens_k", a.seqlens_k}, NamedTensor{"page_table", a.page_table},
                           NamedTensor{"first_key", a.first_key}});
}
auto outputs_of(const lla_forward_args& a) {
  return joined(std::array{NamedTensor{"o", a.o}, NamedTensor{"saved", a.saved}}, row_outputs(a));
}

auto inputs_of(const lla_backward_args& a) {
  return joined(shared_inputs(a), std::array{NamedTensor{"saved", a.saved}, NamedTensor{"grad_o", a.grad_o}});
}
auto outputs_of(const lla_backward_args& a) {
  return joined(std::array{NamedTensor{"dq", a.dq}, NamedTensor{"dk", a.dk}, NamedTensor{"dv", a.dv},
                           NamedTensor{"dx", a.dx}, NamedTensor{"dridge", a.dridge}},
                row_outputs(a));
}

constexpr size_t kWorkspaceAlignment = 256;

template <class Args>
Status check_workspace(const Args& a, size_t needed) {
  if (a.workspace_bytes < needed)
    return {LLA_WORKSPACE_TOO_SMALL, cat("workspace: has ", a.workspace_bytes, " bytes, needs ", needed)};
  if (needed > 0 && a.workspace == nullptr)
    return invalid(cat("workspace: is null, but ", needed, " bytes are needed"));
  if (reinterpret_cast<uintptr_t>(a.workspace) % kWorkspaceAlignment != 0)
    return invalid(cat("workspace: must be aligned to ", kWorkspaceAlignment, " bytes"));
  const Tensor view = dense(a.workspace, DType::f32, {static_cast<int64_t>((needed + 3) / 4)});
  const NamedTensor written[] = {{"workspace", view}};
  return distinct(joined(inputs_of(a), outputs_of(a)), written);
}

}  // namespace

Status validate_workspace(const lla_forward_args& a, size_t needed) { return check_workspace(a, needed); }
Status validate_workspace(const lla_backward_args& a, size_t needed) { return check_workspace(a, needed); }

namespace {

Status read_outputs(const lla_forward_args& a, Pointers pointers, ForwardCall& call) {
  Problem& p = call.problem;
  const NamedTensor o{"o", a.o};
  if (!present(a.o)) return invalid("o: is absent");
  LLA_RETURN_IF_ERROR(check_float_tensor(o, p, a.q, pointers));
  LLA_RETURN_IF_ERROR(check_rows(o, p, p.value_dim, "Dv"));
  LLA_RETURN_IF_ERROR(check_writable(o));
  p.out_dtype = dtype_of(a.o);
  call.o = operand(a.o);
  if (present(a.saved)) {
    if (p.cache) return invalid("saved: is given beside seqlens_k; there is no backward pass over a cache");
    LLA_RETURN_IF_ERROR(check_saved(a.saved, a.q, p, pointers));
  }
  call.saved = a.saved.data;
  LLA_RETURN_IF_ERROR(read_row_outputs(a, pointers, p, call.info));
  return distinct(inputs_of(a), outputs_of(a));
}

}  // namespace

Status validate(const lla_forward_args& a, Pointers pointers, ForwardCall& call) {
  const bool later = pointers == Pointers::outputs_later;
  LLA_RETURN_IF_ERROR(read_inputs(a, later ? Pointers::required : pointers, call));
  Problem& p = call.problem;
  p.operation = Operation::forward;
  LLA_RETURN_IF_ERROR(p.cache ? check_cache_contents(call) : check_no_cache(a));
  return read_outputs(a, later ? Pointers::optional : pointers, call);
}

Status validate_outputs(const lla_forward_args& a, ForwardCall& call) {
  const DType planned = call.problem.out_dtype;
  LLA_RETURN_IF_ERROR(read_outputs(a, Pointers::required, call));
  if (call.problem.out_dtype == planned) return {};
  return invalid(cat("o: dtype is ", name(call.problem.out_dtype), ", but the call was planned for ", name(planned)));
}

Status validate(const lla_backward_args& a, Pointers pointers, BackwardCall& call) {
  if (pointers == Pointers::outputs_later) pointers = Pointers::required;  // only the workspace comes later
  LLA_RETURN_IF_ERROR(read_inputs(a, pointers, call));
  Problem& p = call.problem;
  p.operation = Operation::backward;

  if (!present(a.saved)) return invalid("saved: is absent; the forward pass writes it when asked to");
  LLA_RETURN_IF_ERROR(check_saved(a.saved, a.q, p, pointers));
  call.saved = a.saved.data;
  const NamedTensor grad_o{"grad_o", a.grad_o};
  if (!present(a.grad_o)) return invalid("grad_o: is absent");
  LLA_RETURN_IF_ERROR(check_float_tensor(grad_o, p, a.q, pointers));
  LLA_RETURN_IF_ERROR(check_rows(grad_o, p, p.value_dim, "Dv"));
  call.grad_o = operand(a.grad_o);

  const NamedTensor dq{"dq", a.dq}, dk{"dk", a.dk}, dv{"dv", a.dv}, dx{"dx", a.dx}, dridge{"dridge", a.dridge};
  if (present(a.dridge) && p.given_x()) return invalid("dridge: is given, but the problem has x instead of a ridge");
  if (present(a.dx) && !p.given_x()) return invalid("dx: is given, but the problem has a ridge instead of x");
  bool first = true;
  for (const NamedTensor& t : {dq, dk, dv, dx}) {
    if (!present(t.tensor)) continue;
    LLA_RETURN_IF_ERROR(check_float_tensor(t, p, a.q, pointers));
    if (first) p.out_dtype = dtype_of(t.tensor);
    first = false;
    LLA_RETURN_IF_ERROR(check_dtype(t, {p.out_dtype}, name(p.out_dtype), " like the other gradients"));
    LLA_RETURN_IF_ERROR(check_writable(t));
  }
  if (present(a.dq)) LLA_RETURN_IF_ERROR(check_rows(dq, p, p.dim, "D"));
  if (present(a.dk)) LLA_RETURN_IF_ERROR(check_keys(dk, p, p.dim, "D"));
  if (present(a.dv)) LLA_RETURN_IF_ERROR(check_keys(dv, p, p.value_dim, "Dv"));
  if (present(a.dx)) LLA_RETURN_IF_ERROR(check_rows(dx, p, p.dim, "D"));
  if (present(a.dridge)) {
    LLA_RETURN_IF_ERROR(check_view(dridge, pointers));
    LLA_RETURN_IF_ERROR(same_device(dridge, a.q));
    LLA_RETURN_IF_ERROR(check_dtype(dridge, {call.ridge.dtype}, name(call.ridge.dtype), " like ridge"));
    LLA_RETURN_IF_ERROR(check_writable(dridge));
    if (a.dridge.ndim != a.ridge.ndim || !std::equal(a.ridge.size, a.ridge.size + a.ridge.ndim, a.dridge.size)) {
      return invalid(cat("dridge: shape is ", shape_text(a.dridge), ", must be ridge's, ", shape_text(a.ridge)));
    }
    RidgeShape shape;
    LLA_RETURN_IF_ERROR(read_ridge(a.dridge, p, shape, call.dridge));
  }
  call.dq = operand(a.dq);
  call.dk = operand(a.dk);
  call.dv = operand(a.dv);
  call.dx = operand(a.dx);
  LLA_RETURN_IF_ERROR(read_row_outputs(a, pointers, p, call.info));
  return distinct(inputs_of(a), outputs_of(a));
}

}  // namespace lla::core
