#include "check_run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "bench/device_memory.hpp"
#include "core/convert.hpp"
#include "core/text.hpp"
#include "data/degenerate.hpp"

namespace lla::app {
namespace {

using bench::DeviceMemory;
using bench::synchronize;
using core::Device;
using core::RidgeShape;

enum Stream : uint64_t { kRidgeStream = 100, kXStream, kGradientStream };

double round_to(double value, DType dtype) {
  alignas(double) unsigned char bytes[sizeof(double)];
  core::store(bytes, dtype, 0, value);
  return core::load(bytes, dtype, 0);
}

// An array on the implementation's device and its view.
class Array {
 public:
  Array(Device device, DType dtype, std::vector<int64_t> size, const std::vector<double>* values = nullptr)
      : dtype_(dtype), count_(1), size_(std::move(size)), memory_(allocate(device)) {
    if (!values) {
      memory_.fill(0xFF);  // NaN in every type: what is not written is noticed
      return;
    }
    std::vector<unsigned char> bytes(memory_.size());
    for (int64_t i = 0; i < count_; ++i) core::store(bytes.data(), dtype, i, (*values)[i]);
    memory_.upload(bytes.data());
  }
  // Packed sequences' boundaries.
  Array(Device device, const std::vector<int32_t>& values)
      : dtype_(DType::i32), count_(1), size_{static_cast<int64_t>(values.size())}, memory_(allocate(device)) {
    memory_.upload(values.data());
  }

  lla_tensor view(Device device) const {
    lla_tensor t = dense(memory_.data(), dtype_, {}, device == Device::cuda ? 0 : -1);
    t.ndim = static_cast<int32_t>(size_.size());
    int64_t stride = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      t.size[i] = size_[i];
      t.stride[i] = stride;
      stride *= size_[i];
    }
    return t;
  }

  std::vector<int32_t> integers() const {
    std::vector<int32_t> out(count_);
    memory_.download(out.data());
    return out;
  }
  std::vector<double> values() const {
    std::vector<unsigned char> bytes(memory_.size());
    memory_.download(bytes.data());
    std::vector<double> out(count_);
    for (int64_t i = 0; i < count_; ++i) out[i] = core::load(bytes.data(), dtype_, i);
    return out;
  }

 private:
  DeviceMemory allocate(Device device) {
    for (int64_t n : size_) count_ *= n;
    return DeviceMemory(device, static_cast<size_t>(count_ * core::size_of(dtype_)));
  }

  DType dtype_;
  int64_t count_;
  std::vector<int64_t> size_;
  DeviceMemory memory_;
};

// Sizes as the interface wants them: packed tensors have no batch.
std::vector<int64_t> sizes(const CheckCase& c, std::vector<int64_t> dense) {
  if (!c.shape->sequences.empty()) dense.erase(dense.begin());
  return dense;
}

std::vector<int64_t> ridge_sizes(const CheckCase& c) {
  const data::Sizes& s = c.shape->sizes;
  switch (c.ridge) {
    case RidgeShape::scalar: return {};
    case RidgeShape::head: return {s.heads_q};
    case RidgeShape::token: return sizes(c, {s.batch, s.length_q, s.heads_q});
    default: return sizes(c, {s.batch, s.length_q, s.heads_q, s.dim});
  }
}

int64_t product(const std::vector<int64_t>& size) {
  int64_t n = 1;
  for (int64_t x : size) n *= x;
  return n;
}

// One case laid out for one implementation.
class Run {
 public:
  Run(const CheckCase& c, const CheckInputs& in, DType dtype, DType gradient_dtype, Device device,
      const char* implementation)
      : case_(c),
        device_(device),
        implementation_(implementation),
        auxiliary_(dtype == DType::f64 ? DType::f64 : DType::f32),
        q_(device, dtype, row_size(c.shape->sizes.dim), &in.q),
        k_(device, dtype, key_size(c.shape->sizes.dim), &in.k),
        v_(device, dtype, key_size(c.shape->sizes.value_dim), &in.v),
        grad_o_(device, dtype, row_size(c.shape->sizes.value_dim), &in.grad_o),
        o_(device, dtype, row_size(c.shape->sizes.value_dim)),
        dq_(device, gradient_dtype, row_size(c.shape->sizes.dim)),
        dk_(device, gradient_dtype, key_size(c.shape->sizes.dim)),
        dv_(device, gradient_dtype, key_size(c.shape->sizes.value_dim)),
        given_(c.ridge == RidgeShape::none ? Array(device, auxiliary_, row_size(c.shape->sizes.dim), &in.x)
                                           : Array(device, auxiliary_, ridge_sizes(c), &in.ridge)),
        dgiven_(device, auxiliary_, c.ridge == RidgeShape::none ? row_size(c.shape->sizes.dim) : ridge_sizes(c)) {
    if (!c.shape->sequences.empty()) sequences_.emplace(device, c.shape->sequences);
  }

  CheckResult execute(Solver solver, double tolerance) {
    CheckResult result;
    ForwardArgs forward_args;
    describe(forward_args, solver, tolerance);
    forward_args.o = o_.view(device_);
    ForwardSizes needed;
    if (Status s = query(forward_args, needed); !s) {
      (s.code() == LLA_UNSUPPORTED ? result.forward.refused : result.forward.failed) = s.message();
      return result;
    }
    const Array saved(device_, auxiliary_, {needed.saved_elements});
    forward_args.saved = saved.view(device_);
    const Array forward_status(device_, DType::i32, status_size()), backward_status(device_, DType::i32, status_size());
    forward_args.row_status = forward_status.view(device_);

    BackwardArgs backward_args;
    describe(backward_args, solver, tolerance);
    backward_args.saved = saved.view(device_);
    backward_args.grad_o = grad_o_.view(device_);
    backward_args.row_status = backward_status.view(device_);
    backward_args.dq = dq_.view(device_);
    backward_args.dk = dk_.view(device_);
    backward_args.dv = dv_.view(device_);
    (case_.ridge == RidgeShape::none ? backward_args.dx : backward_args.dridge) = dgiven_.view(device_);

    result.forward = call(forward_args, lla_forward);
    if (!result.forward.done()) {
      result.backward.refused = "it needs what the forward call saves";
      return result;
    }
    result.o = o_.values();
    result.forward_status = forward_status.integers();
    result.backward = call(backward_args, lla_backward);
    if (!result.backward.done()) return result;
    result.dq = dq_.values();
    result.dk = dk_.values();
    result.dv = dv_.values();
    result.dridge = dgiven_.values();
    result.backward_status = backward_status.integers();
    return result;
  }

 private:
  std::vector<int64_t> row_size(int64_t channels) const {
    const data::Sizes& s = case_.shape->sizes;
    return sizes(case_, {s.batch, s.length_q, s.heads_q, channels});
  }
  std::vector<int64_t> key_size(int64_t channels) const {
    const data::Sizes& s = case_.shape->sizes;
    return sizes(case_, {s.batch, s.length_k, s.heads_kv, channels});
  }

  std::vector<int64_t> status_size() const {
    const data::Sizes& s = case_.shape->sizes;
    return sizes(case_, {s.batch, s.heads_q, s.length_q});
  }

  template <class Args>
  void describe(Args& args, Solver solver, double tolerance) const {
    args.q = q_.view(device_);
    args.k = k_.view(device_);
    args.v = v_.view(device_);
    (case_.ridge == RidgeShape::none ? args.x : args.ridge) = given_.view(device_);
    if (sequences_) {
      args.cu_seqlens_q = args.cu_seqlens_k = sequences_->view(device_);
      args.max_seqlen_q = args.max_seqlen_k = longest();
    }
    args.options.causal = case_.mask->causal;
    args.options.window_left = case_.mask->left;
    args.options.window_right = case_.mask->right;
    args.options.solver = static_cast<int32_t>(solver);
    args.options.tolerance = tolerance;
    args.options.implementation = implementation_;
    args.options.scale = case_.scale;
    args.options.max_iterations = case_.max_iterations;
  }

  int64_t longest() const {
    int64_t n = 0;
    const auto& at = case_.shape->sequences;
    for (size_t i = 1; i < at.size(); ++i) n = std::max<int64_t>(n, at[i] - at[i - 1]);
    return n;
  }

  template <class Args, class Function>
  CheckCall call(Args& args, Function run) const {
    size_t bytes = 0;
    if (Status s = workspace_bytes(args, bytes); !s) {
      return s.code() == LLA_UNSUPPORTED ? CheckCall{s.message(), ""} : CheckCall{"", s.message()};
    }
    DeviceMemory workspace(device_, std::max<size_t>(bytes, 1));
    workspace.fill(0xFF);
    args.workspace = workspace.data();
    args.workspace_bytes = bytes;
    if (Status s = Status::last(run(&args)); !s) return {"", s.message()};
    synchronize(device_);
    return {};
  }

  const CheckCase& case_;
  Device device_;
  const char* implementation_;
  DType auxiliary_;  // of ridge, x, saved
  Array q_, k_, v_, grad_o_, o_, dq_, dk_, dv_;
  Array given_, dgiven_;  // ridge, or x
  std::optional<Array> sequences_;
};

// Norms of the difference and of the reference, per group of rows.
struct Distance {
  std::vector<double> difference, norm, moves;  // squared

  explicit Distance(int64_t groups) : difference(groups), norm(groups), moves(groups) {}

  void add(int64_t group, double reference, double value, double moved) {
    difference[group] += (value - reference) * (value - reference);
    norm[group] += reference * reference;
    moves[group] += (moved - reference) * (moved - reference);
  }

  // The worst group; `forgiven` and what roundings move the reference by are taken off each difference.
  double worst(double forgiven) const {
    double worst = 0;
    for (size_t i = 0; i < norm.size(); ++i) {
      const double left = std::sqrt(difference[i]) - forgiven - data::kForgivenMoves * std::sqrt(moves[i]);
      if (left <= 0) continue;
      const double relative = norm[i] > 0 ? left / std::sqrt(norm[i]) : std::numeric_limits<double>::infinity();
      if (std::isnan(relative) || std::isnan(left)) return std::numeric_limits<double>::quiet_NaN();
      worst = std::max(worst, relative);
    }
    return worst;
  }
};

// Over a (batch, length, heads, channels) array; packed: over sequences, for both lengths alike.
double worst_head(const CheckCase& c, int64_t length, int64_t heads, const std::vector<double>& reference,
                  const std::vector<double>& value, const std::vector<double>& moved, double forgiven = 0) {
  const auto& at = c.shape->sequences;
  const int64_t groups = at.empty() ? c.shape->sizes.batch : static_cast<int64_t>(at.size()) - 1;
  const int64_t rows = c.shape->sizes.batch * length * heads;
  const int64_t channels = static_cast<int64_t>(reference.size()) / rows;
  Distance distance(groups * heads);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = row / heads;
    int64_t group = position / length;
    if (!at.empty()) {
      group = 0;
      while (position >= at[group + 1]) ++group;
    }
    for (int64_t i = row * channels; i < (row + 1) * channels; ++i) {
      distance.add(group * heads + row % heads, reference[i], value[i], moved[i]);
    }
  }
  return distance.worst(forgiven);
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (double x : values) sum += x * x;
  return std::sqrt(sum);
}

double largest_row(const std::vector<double>& values, int64_t channels) {
  double largest = 0;
  for (size_t row = 0; row < values.size(); row += channels) {
    double sum = 0;
    for (int64_t i = 0; i < channels; ++i) sum += values[row + i] * values[row + i];
    largest = std::max(largest, sum);
  }
  return std::sqrt(largest);
}

// A few units of rounding of scale * G.v times a row of q or k, the largest intermediate of dk and dq. Arithmetic is
// fp32 for inputs of 32 and 16 bits.
double gradient_rounding(const CheckCase& c, const CheckInputs& in, const std::vector<double>& rows) {
  const data::Sizes& s = c.shape->sizes;
  const double unit = c.dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  return 8 * unit / std::sqrt(static_cast<double>(s.dim)) * norm(in.grad_o) * largest_row(in.v, s.value_dim) *
         largest_row(rows, s.dim);
}

// The ridge given per token, head and dimension, so that the reference returns every term of dridge.
CheckInputs with_ridge_per_dimension(const CheckCase& c, const CheckInputs& in) {
  const data::Sizes& s = c.shape->sizes;
  CheckInputs out = in;
  out.ridge.resize(in.q.size());
  for (size_t i = 0; i < out.ridge.size(); ++i) {
    const size_t token_and_head = i / s.dim;
    switch (c.ridge) {
      case RidgeShape::scalar: out.ridge[i] = in.ridge[0]; break;
      case RidgeShape::head: out.ridge[i] = in.ridge[token_and_head % s.heads_q]; break;
      case RidgeShape::token: out.ridge[i] = in.ridge[token_and_head]; break;
      default: break;
    }
  }
  return out;
}

std::vector<double> sum_terms(const CheckCase& c, const std::vector<double>& terms, size_t count) {
  const data::Sizes& s = c.shape->sizes;
  std::vector<double> sums(count);
  for (size_t i = 0; i < terms.size(); ++i) {
    const size_t token_and_head = i / s.dim;
    switch (c.ridge) {
      case RidgeShape::scalar: sums[0] += terms[i]; break;
      case RidgeShape::head: sums[token_and_head % s.heads_q] += terms[i]; break;
      case RidgeShape::token: sums[token_and_head] += terms[i]; break;
      default: sums[i] = terms[i]; break;
    }
  }
  return sums;
}

}  // namespace

CheckInputs make_check_inputs(const CheckCase& c) {
  const uint64_t seed = c.seed;
  const data::Sizes& s = c.shape->sizes;
  data::Tensors t = data::make(c.kind, seed, s);
  CheckInputs in{std::move(t.q), std::move(t.k), std::move(t.v), {}, {}, {}};
  const DType auxiliary = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (c.ridge == RidgeShape::none) {
    in.x.resize(in.q.size());
    for (size_t i = 0; i < in.x.size(); ++i) in.x[i] = round_to(0.2 * data::normal(seed, kXStream, i), auxiliary);
  } else {
    in.ridge.resize(product(ridge_sizes(c)));
    for (size_t i = 0; i < in.ridge.size(); ++i) {
      in.ridge[i] = round_to(c.lambda * (0.5 + data::uniform(seed, kRidgeStream, i)), auxiliary);
    }
  }
  in.grad_o.resize(s.batch * s.length_q * s.heads_q * s.value_dim);
  for (size_t i = 0; i < in.grad_o.size(); ++i) {
    const bool zero = c.degenerate() && i / s.value_dim / s.heads_q % 6 == 4;
    in.grad_o[i] = zero ? 0 : std::ldexp(data::normal(seed, kGradientStream, i), c.gradient_power);
  }
  for (std::vector<double>* values : {&in.q, &in.k, &in.v, &in.grad_o}) {
    for (double& x : *values) x = round_to(x, c.dtype);
  }
  return in;
}

CheckResult run_reference(const CheckCase& c, const CheckInputs& inputs) {
  const bool sums = c.ridge == RidgeShape::scalar || c.ridge == RidgeShape::head || c.ridge == RidgeShape::token;
  CheckCase expanded = c;
  if (sums) expanded.ridge = RidgeShape::dimension;
  CheckResult r = Run(expanded, sums ? with_ridge_per_dimension(c, inputs) : inputs, DType::f64, DType::f64,
                      Device::cpu, "reference")
                      .execute(Solver::direct, c.tolerance());
  r.dridge_terms = r.dridge;
  if (sums && r.backward.done()) r.dridge = sum_terms(c, r.dridge_terms, inputs.ridge.size());
  return r;
}

CheckResult run_implementation(const CheckCase& c, const CheckInputs& inputs,
                               const core::Implementation& implementation) {
  // Gradients of 16-bit inputs in fp32: their own rounding is not what is checked.
  const DType gradients = c.dtype == DType::f64 ? DType::f64 : DType::f32;
  return Run(c, inputs, c.dtype, gradients, implementation.device, implementation.name)
      .execute(c.solver, c.tolerance());
}

CheckInputs perturbed(const CheckCase& c, const CheckInputs& inputs) {
  CheckInputs out = inputs;
  uint64_t stream = 0;
  for (std::vector<double>* values : {&out.q, &out.k, &out.v, &out.grad_o, &out.x}) {
    data::perturb(*values, ++stream, data::rounding_of(c.dtype));
  }
  return out;
}

int64_t CheckResult::unsolved() const {
  int64_t rows = 0;
  for (size_t i = 0; i < forward_status.size(); ++i) {
    rows += forward_status[i] != LLA_ROW_OK || (i < backward_status.size() && backward_status[i] != LLA_ROW_OK);
  }
  return rows;
}

CheckErrors check_errors(const CheckCase& c, const CheckInputs& inputs, const CheckResult& reference,
                         const CheckResult& result, const CheckResult* moved) {
  const data::Sizes& s = c.shape->sizes;
  CheckErrors errors;
  if (!result.forward.done()) return errors;
  if (moved && result.unsolved() > 0) {
    const auto finite = [](const std::vector<double>& values) {
      return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
    };
    if (!finite(result.o)) errors.output = std::numeric_limits<double>::quiet_NaN();
    for (const auto* values : {&result.dq, &result.dk, &result.dv, &result.dridge}) {
      if (!finite(*values)) errors.gradients = std::numeric_limits<double>::quiet_NaN();
    }
    return errors;
  }
  const CheckResult& near = moved ? *moved : reference;
  errors.output = worst_head(c, s.length_q, s.heads_q, reference.o, result.o, near.o);
  if (!result.backward.done()) return errors;
  const auto consider = [&](const char* name, double error) {
    if (!(error <= errors.gradients) && !std::isnan(errors.gradients)) {
      errors.gradients = error;
      errors.worst_gradient = name;
    }
  };
  consider("dq", worst_head(c, s.length_q, s.heads_q, reference.dq, result.dq, near.dq,
                            gradient_rounding(c, inputs, inputs.k)));
  consider("dk", worst_head(c, s.length_k, s.heads_kv, reference.dk, result.dk, near.dk,
                            gradient_rounding(c, inputs, inputs.q)));
  consider("dv", worst_head(c, s.length_k, s.heads_kv, reference.dv, result.dv, near.dv));
  std::vector<double> difference = result.dridge;
  for (size_t i = 0; i < difference.size(); ++i) difference[i] -= reference.dridge[i];
  std::vector<double> moves = near.dridge_terms;
  for (size_t i = 0; i < moves.size(); ++i) moves[i] -= reference.dridge_terms[i];
  const double left = norm(difference) - data::kForgivenMoves * norm(moves);
  consider(c.ridge == RidgeShape::none ? "dx" : "dridge",
           left > 0 || std::isnan(left) ? left / norm(reference.dridge_terms) : 0);
  return errors;
}

}  // namespace lla::app
