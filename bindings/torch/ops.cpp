// The operators lla::forward and lla::backward (ridge or a given x), and lla::plan and friends that say what they would
// do. Each fills the structs of lla.h from torch tensors and options and calls the C interface; nothing else happens
// here. Autograd, fake (meta) and autocast rules are registered from Python (python/lla/_ops.py).
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>

#include "lla/lla.hpp"
#include "tensors.hpp"

namespace lla::torch_ops {
namespace {

using MaybeTensor = std::optional<Tensor>;

// What every operator takes after its tensors, in schema order.
const std::string kOptionsSchema =
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale, bool causal, "
    "SymInt window_left, SymInt window_right, float? tol, int max_iterations, str solver, str? implementation, bool "
    "tf32";
// The same with the defaults of the Python functions: a call that leaves them out is the cheapest.
const std::string kDefaultsSchema =
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, float? "
    "scale=None, bool causal=True, SymInt window_left=-1, SymInt window_right=-1, float? tol=None, int "
    "max_iterations=0, str solver='auto', str? implementation=None, bool tf32=False";

struct Options {
  const MaybeTensor& cu_seqlens_q;
  const MaybeTensor& cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  std::optional<double> scale;
  bool causal;
  int64_t window_left, window_right;
  std::optional<double> tol;
  int64_t max_iterations;
  const std::string& solver;
  const std::optional<std::string>& implementation;
  bool tf32;  // allowed for f32 tensors
};

// The texts are read again by python/lla/_errors.py, which chooses the exception type by them.
[[noreturn]] void fail(lla_status status) {
  const char* kind = status == LLA_INVALID_ARGUMENT ? "invalid argument"
                     : status == LLA_UNSUPPORTED    ? "unsupported"
                     : status == LLA_OUT_OF_MEMORY  ? "out of memory"
                     : status == LLA_CUDA_ERROR     ? "CUDA error"
                                                    : "internal error";
  throw std::runtime_error(std::string("lla: ") + kind + ": " + lla_last_error());
}

void check(lla_status status) {
  if (status != LLA_OK) fail(status);
}

[[noreturn]] void invalid(const std::string& message) { throw std::runtime_error("lla: invalid argument: " + message); }

lla_solver parse_solver(const std::string& name) {
  if (name == "auto") return LLA_SOLVER_AUTO;
  if (name == "cg") return LLA_SOLVER_CG;
  if (name == "direct") return LLA_SOLVER_DIRECT;
  invalid("solver must be \"auto\", \"cg\" or \"direct\", not \"" + name + "\"");
}

// Either kind of arguments, filled from what both have in common. What `options` refers to must outlive them.
template <class Args>
void fill(Args& args, const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ridge, const MaybeTensor& x,
          const Options& options) {
  args.q = view(q, "q");
  args.k = view(k, "k");
  args.v = view(v, "v");
  args.ridge = view(ridge, "ridge");
  args.x = view(x, "x");
  args.cu_seqlens_q = view(options.cu_seqlens_q, "cu_seqlens_q");
  args.cu_seqlens_k = view(options.cu_seqlens_k, "cu_seqlens_k");
  args.max_seqlen_q = options.max_seqlen_q;
  args.max_seqlen_k = options.max_seqlen_k;
  if (options.scale && std::isnan(*options.scale)) invalid("scale is NaN");  // which lla.h takes for "not given"
  if (options.tol && std::isnan(*options.tol)) invalid("tol is NaN");
  if (options.max_iterations < 0 || options.max_iterations > INT32_MAX) {
    invalid("max_iterations must be between 0 (the default) and 2^31 - 1");
  }
  lla::Options& o = args.options;
  if (options.scale) o.scale = *options.scale;
  o.causal = options.causal;
  o.window_left = options.window_left;
  o.window_right = options.window_right;
  if (options.tol) o.tolerance = *options.tol;
  o.max_iterations = static_cast<int32_t>(options.max_iterations);
  o.solver = parse_solver(options.solver);
  o.implementation = options.implementation ? options.implementation->c_str() : nullptr;
  o.precision = options.tf32 ? LLA_PRECISION_TF32 : LLA_PRECISION_FULL;
}

// Queries, keys and values have their head dimensions at the end whether packed or not.
void check_ranks(const Tensor& q, const Tensor& v, const MaybeTensor& cu_seqlens_q) {
  const int64_t rank = cu_seqlens_q ? 3 : 4;
  const char* layout =
      cu_seqlens_q ? " dimensions, not (total, heads, dim)" : " dimensions, not (batch, length, heads, dim)";
  if (q.dim() != rank) invalid("q has " + std::to_string(q.dim()) + layout);
  if (v.dim() != rank) invalid("v has " + std::to_string(v.dim()) + layout);
}

// Runs on the tensors' device, as torch's own operators do.
std::optional<torch::stable::accelerator::DeviceGuard> enter_device(const Tensor& q) {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (q.is_cuda()) {
    guard.emplace(q.get_device_index());
  } else {
    adopt_torch_threads();
  }
  return guard;
}

ScalarType saved_type(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// What is known of each row, in one tensor: iterations, residual (the bits of a float), status. Points the arguments at
// it.
template <class Args>
Tensor make_row_info(Args& args, const Tensor& q, bool packed) {
  const int64_t batch = packed ? 1 : q.size(0), length = q.size(packed ? 0 : 1), heads = q.size(packed ? 1 : 2);
  Tensor row_info = empty({3, batch * heads * length}, ScalarType::Int, q);
  const auto section = [&](int64_t index, lla_dtype dtype) {
    lla_tensor t = args.q;  // for the device; the size is (B, Hq, Lq), packed (Hq, total_q)
    t.data = static_cast<int32_t*>(row_info.data_ptr()) + index * batch * heads * length;
    t.dtype = dtype;
    t.ndim = packed ? 2 : 3;
    const int64_t size[3] = {batch, heads, length}, stride[3] = {heads * length, length, 1};
    std::copy(size + packed, size + 3, t.size);
    std::copy(stride + packed, stride + 3, t.stride);
    return t;
  };
  args.iterations = section(0, LLA_I32);
  args.residual = section(1, LLA_F32);
  args.row_status = section(2, LLA_I32);
  return row_info;
}

// The output; also what the backward pass needs and what is known of each row, where a place for them is given.
Tensor run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& ridge, const MaybeTensor& x,
                   const Options& options, MaybeTensor* saved, MaybeTensor* row_info) {
  const auto guard = enter_device(q);
  check_ranks(q, v, options.cu_seqlens_q);
  ForwardArgs args;
  fill(args, q, k, v, ridge, x, options);

  const bool packed = options.cu_seqlens_q.has_value();
  const int64_t batch = packed ? 1 : q.size(0), length = q.size(packed ? 0 : 1), heads = q.size(packed ? 1 : 2);
  const int64_t value_dim = v.size(packed ? 2 : 3);
  Tensor o = packed ? empty({length, heads, value_dim}, q.scalar_type(), q)
                    : empty({batch, length, heads, value_dim}, q.scalar_type(), q);
  args.o = view(o, "o");
  if (row_info != nullptr) *row_info = make_row_info(args, q, packed);
  ForwardSizes sizes;
  check(lla_forward_query(&args, &sizes));
  if (saved != nullptr) {
    *saved = empty({sizes.saved_elements}, saved_type(q), q);
    args.saved = view(**saved, "saved");
  }

  args.workspace_bytes = sizes.workspace_bytes;
  const Workspace workspace(args.workspace_bytes, q);
  args.workspace = workspace.data();
  args.stream = current_stream(q);
  check(lla_forward(&args));
  return o;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x,
                                           MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k, int64_t max_seqlen_q,
                                           int64_t max_seqlen_k, std::optional<double> scale, bool causal,
                                           int64_t window_left, int64_t window_right, std::optional<double> tol,
                                           int64_t max_iterations, std::string solver,
                                           std::optional<std::string> implementation, bool tf32, bool save, bool info) {
  MaybeTensor saved, row_info;
  Tensor o = run_forward(q, k, v, ridge, x,
                         {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left,
                          window_right, tol, max_iterations, solver, implementation, tf32},
                         save ? &saved : nullptr, info ? &row_info : nullptr);
  return {o, save ? *saved : empty({0}, saved_type(q), q), info ? *row_info : empty({0}, ScalarType::Int, q)};
}

// The output alone, in one tensor: the short way for small problems.
Tensor inference(Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x, MaybeTensor cu_seqlens_q,
                 MaybeTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
                 bool causal, int64_t window_left, int64_t window_right, std::optional<double> tol,
                 int64_t max_iterations, std::string solver, std::optional<std::string> implementation, bool tf32) {
  return run_forward(q, k, v, ridge, x,
                     {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right,
                      tol, max_iterations, solver, implementation, tf32},
                     nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor grad_o, Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x, Tensor saved,
    MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right, std::optional<double> tol,
    int64_t max_iterations, std::string solver, std::optional<std::string> implementation, bool tf32, bool need_dq,
    bool need_dk, bool need_dv, bool need_dridge, bool info) {
  const auto guard = enter_device(q);
  check_ranks(q, v, cu_seqlens_q);
  if (!ridge && !x) invalid("give one of ridge and x");
  BackwardArgs args;
  fill(args, q, k, v, ridge, x,
       {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, tol,
        max_iterations, solver, implementation, tf32});
  args.grad_o = view(grad_o, "grad_o");
  args.saved = view(saved, "saved");

  const auto gradient = [&](bool needed, const Tensor& of, lla_tensor& slot) {
    if (!needed) return empty({0}, of.scalar_type(), of);
    Tensor made = empty_like(of);
    slot = view(made, "gradient");
    return made;
  };
  Tensor dq = gradient(need_dq, q, args.dq), dk = gradient(need_dk, k, args.dk), dv = gradient(need_dv, v, args.dv);
  Tensor dridge = gradient(need_dridge, ridge ? *ridge : *x, ridge ? args.dridge : args.dx);
  Tensor row_info = info ? make_row_info(args, q, cu_seqlens_q.has_value()) : empty({0}, ScalarType::Int, q);

  BackwardSizes sizes;
  check(lla_backward_query(&args, &sizes));
  args.workspace_bytes = sizes.workspace_bytes;
  const Workspace workspace(args.workspace_bytes, q);
  args.workspace = workspace.data();
  args.stream = current_stream(q);
  check(lla_backward(&args));
  return {dq, dk, dv, dridge, row_info};
}

// Text as a tensor (uint8, zero-padded to a fixed size), so that a traced graph can hold the call.
constexpr int64_t kTextBytes = 4096;

Tensor plan(Tensor q, Tensor k, Tensor v, MaybeTensor ridge, MaybeTensor x, MaybeTensor cu_seqlens_q,
            MaybeTensor cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
            bool causal, int64_t window_left, int64_t window_right, std::optional<double> tol, int64_t max_iterations,
            std::string solver, std::optional<std::string> implementation, bool tf32, bool explain) {
  const auto guard = enter_device(q);
  check_ranks(q, v, cu_seqlens_q);
  ForwardArgs args;
  fill(args, q, k, v, ridge, x,
       {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_left, window_right, tol,
        max_iterations, solver, implementation, tf32});
  const bool packed = cu_seqlens_q.has_value();
  lla_tensor o = args.q;  // stands in, without data, for the dense output a call would make
  o.data = nullptr;
  o.size[packed ? 2 : 3] = v.size(packed ? 2 : 3);
  int64_t stride = 1;
  for (int i = o.ndim - 1; i >= 0; --i) {
    o.stride[i] = stride;
    stride *= o.size[i] > 0 ? o.size[i] : 1;
  }
  args.o = o;
  Tensor text = empty_cpu(kTextBytes);
  char* to = static_cast<char*>(text.data_ptr());
  std::fill(to, to + kTextBytes, '\0');
  check(explain ? lla_forward_explain(&args, to, kTextBytes) : lla_forward_plan(&args, to, kTextBytes));
  return text;
}

// What a row takes of the saved vector: the fake kernels multiply it by symbolic numbers of rows.
int64_t saved_row_elements(int64_t dim, int64_t value_dim) {
  ForwardArgs args;
  args.q = args.k = dense(nullptr, DType::f32, {1, 1, 1, dim});
  args.v = args.o = dense(nullptr, DType::f32, {1, 1, 1, value_dim});
  args.ridge = scalar(nullptr);
  ForwardSizes sizes;
  check(lla_forward_query(&args, &sizes));
  return sizes.saved_elements;
}

std::string implementations() {
  std::string lines;
  for (int32_t i = 0; lla_implementation_name(i) != nullptr; ++i) {
    lines += std::string(lla_implementation_name(i)) + ": " + lla_implementation_description(i) + "\n";
  }
  return lines;
}

std::string machine() { return lla_machine_description(); }

std::string version() { return lla_version(); }

// The same for every device: the library behind lla.h chooses by where the tensors are.
void register_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("forward", TORCH_BOX(&forward));
  library.impl("inference", TORCH_BOX(&inference));
  library.impl("backward", TORCH_BOX(&backward));
  library.impl("plan", TORCH_BOX(&plan));
}

}  // namespace
}  // namespace lla::torch_ops

STABLE_TORCH_LIBRARY(lla, m) {
  using lla::torch_ops::kDefaultsSchema;
  using lla::torch_ops::kOptionsSchema;
  const std::string inputs = "Tensor q, Tensor k, Tensor v, Tensor? ridge, Tensor? x, ";
  m.def(("forward(" + inputs + kOptionsSchema + ", bool save, bool info) -> (Tensor o, Tensor saved, Tensor row_info)")
            .c_str());
  m.def(("inference(" + inputs + kDefaultsSchema + ") -> Tensor").c_str());
  m.def(
      ("backward(Tensor grad_o, " + inputs + "Tensor saved, " + kOptionsSchema +
       ", bool need_dq, bool need_dk, bool need_dv, bool need_dridge, bool info) -> (Tensor dq, Tensor dk, Tensor dv, "
       "Tensor dridge, Tensor row_info)")
          .c_str());
  m.def(("plan(" + inputs + kOptionsSchema + ", bool explain) -> Tensor").c_str());
  m.def("saved_row_elements(int dim, int value_dim) -> int");
  m.def("implementations() -> str");
  m.def("machine() -> str");
  m.def("version() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(lla, CPU, m) { lla::torch_ops::register_kernels(m); }

STABLE_TORCH_LIBRARY_IMPL(lla, CUDA, m) { lla::torch_ops::register_kernels(m); }

STABLE_TORCH_LIBRARY_IMPL(lla, CompositeExplicitAutograd, m) {
  m.impl("saved_row_elements", TORCH_BOX(&lla::torch_ops::saved_row_elements));
  m.impl("implementations", TORCH_BOX(&lla::torch_ops::implementations));
  m.impl("machine", TORCH_BOX(&lla::torch_ops::machine));
  m.impl("version", TORCH_BOX(&lla::torch_ops::version));
}
