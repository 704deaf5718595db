#include "support/run.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "plan/implementation.hpp"

namespace lla::test {
namespace {

const core::Implementation* find(const std::string& name) {
  for (const core::Implementation* i : core::implementations()) {
    if (name == i->name) return i;
  }
  throw std::invalid_argument("no implementation " + name);
}

// The tensors every call has, in the memory of the implementation.
struct Operands {
  Memory& memory;
  TestTensor q, k, v, ridge, x, cu_q, cu_k;

  Operands(const Spec& s, const Inputs& in, Memory& m)
      : memory(m),
        q(m, "q", s.dtype, s.rows_size(s.dim), s.layout, in.q),
        k(m, "k", s.dtype, s.keys_size(s.dim), s.layout, in.k),
        v(m, "v", s.dtype, s.keys_size(s.value_dim), s.layout, in.v) {
    if (s.ridge == RidgeShape::none) {
      x = TestTensor(m, "x", s.given_dtype(), s.rows_size(s.dim), s.layout, in.x);
    } else {
      ridge = TestTensor(m, "ridge", s.ridge_dtype(), s.ridge_size(), s.layout, in.ridge);
    }
    if (s.packed()) {
      const auto as_doubles = [](const std::vector<int32_t>& v) { return std::vector<double>(v.begin(), v.end()); };
      const auto size = static_cast<int64_t>(s.cu_q.size());
      cu_q = TestTensor(m, "cu_seqlens_q", DType::i32, {size}, Layout::dense, as_doubles(s.cu_q));
      cu_k = TestTensor(m, "cu_seqlens_k", DType::i32, {size}, Layout::dense, as_doubles(s.cu_k));
    }
  }

  template <class Args>
  void attach(Args& args, const Spec& s, const std::string& implementation) const {
    args.options = s.options;
    args.options.implementation = implementation.c_str();
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.ridge = ridge.view();
    args.x = x.view();
    args.cu_seqlens_q = cu_q.view();
    args.cu_seqlens_k = cu_k.view();
    if (s.packed()) {
      args.max_seqlen_q = longest(s.cu_q);
      args.max_seqlen_k = longest(s.cu_k);
    }
  }

  void expect_intact() const {
    for (const TestTensor* t : {&q, &k, &v, &ridge, &x, &cu_q, &cu_k}) t->expect_intact();
  }

  static int64_t longest(const std::vector<int32_t>& cu) {
    int32_t length = 0;
    for (size_t i = 1; i < cu.size(); ++i) length = std::max(length, cu[i] - cu[i - 1]);
    return length;
  }
};

struct InfoTensors {
  TestTensor iterations, residual, status;

  template <class Args>
  InfoTensors(const Spec& s, Memory& m, Args& args)
      : iterations(m, "iterations", DType::i32, s.info_size()),
        residual(m, "residual", DType::f32, s.info_size()),
        status(m, "row_status", DType::i32, s.info_size()) {
    args.iterations = iterations.view();
    args.residual = residual.view();
    args.row_status = status.view();
  }

  RowInfo read() const {
    for (const TestTensor* t : {&iterations, &residual, &status}) t->expect_intact();
    const auto as_ints = [](const std::vector<double>& v) { return std::vector<int>(v.begin(), v.end()); };
    return {as_ints(iterations.values()), as_ints(status.values()), residual.values()};
  }
};

// Asks for the workspace, runs with a poisoned one, and checks its surroundings.
template <class Args, class Run>
lla_status run_guarded(Args& args, Memory& memory, Run run) {
  size_t bytes = 0;
  if (const Status status = workspace_bytes(args, bytes); !status) return status.code();
  GuardedBuffer workspace(memory, bytes);
  args.workspace = workspace.data();
  args.workspace_bytes = bytes;
  const lla_status status = run(&args);
  memory.synchronize();
  EXPECT_TRUE(workspace.guards_intact()) << "written outside the workspace";
  return status;
}

}  // namespace

Spec as_oracle(Spec spec) {
  spec.dtype = DType::f64;
  spec.out_dtype = DType::none;
  spec.layout = Layout::dense;
  spec.options.solver = LLA_SOLVER_DIRECT;
  spec.options.weights = LLA_WEIGHTS_AUTO;
  return spec;
}

Forward run_forward(const Spec& spec, const Inputs& inputs, const std::string& implementation, Want want) {
  SCOPED_TRACE(implementation + " forward: " + spec.text());
  const Operands operands(spec, inputs, memory_of(implementation));
  ForwardArgs args;
  operands.attach(args, spec, implementation);
  const TestTensor o(operands.memory, "o", spec.output(), spec.rows_size(spec.value_dim), spec.layout);
  args.o = o.view();
  Forward result;
  TestTensor saved;
  if (want.saved) {
    if ((result.status = lla_forward_query(&args, &result.sizes)) != LLA_OK) {
      result.message = lla_last_error();
      return result;
    }
    saved = TestTensor(operands.memory, "saved", spec.ridge_dtype(), {result.sizes.saved_elements});
    args.saved = saved.view();
  }
  std::unique_ptr<InfoTensors> info;
  if (want.info) info = std::make_unique<InfoTensors>(spec, operands.memory, args);
  result.status = run_guarded(args, operands.memory, lla_forward);
  if (result.status != LLA_OK) result.message = lla_last_error();
  operands.expect_intact();
  o.expect_intact();
  saved.expect_intact();
  result.o = o.values();
  result.saved = saved.values();
  if (info) result.info = info->read();
  return result;
}

Backward run_backward(const Spec& spec, const Inputs& inputs, const std::string& implementation) {
  const Forward forward = run_forward(spec, inputs, implementation);
  if (forward.status == LLA_OK) return run_backward(spec, inputs, forward.saved, implementation);
  Backward failed;
  failed.status = forward.status;
  failed.message = forward.message;
  return failed;
}

Backward run_backward(const Spec& spec, const Inputs& inputs, const std::vector<double>& saved_values,
                      const std::string& implementation, WantGradients want) {
  SCOPED_TRACE(implementation + " backward: " + spec.text());
  const Operands operands(spec, inputs, memory_of(implementation));
  Memory& memory = operands.memory;
  BackwardArgs args;
  operands.attach(args, spec, implementation);
  const TestTensor saved(memory, "saved", spec.ridge_dtype(), {static_cast<int64_t>(saved_values.size())},
                         Layout::dense, saved_values);
  const TestTensor grad_o(memory, "grad_o", spec.dtype, spec.rows_size(spec.value_dim), spec.layout, inputs.grad_o);
  const auto output = [&](bool wanted, const char* name, DType dtype, const std::vector<int64_t>& size) {
    return wanted ? TestTensor(memory, name, dtype, size, spec.layout) : TestTensor();
  };
  const bool given_x = spec.ridge == RidgeShape::none;
  const TestTensor dq = output(want.q, "dq", spec.output(), spec.rows_size(spec.dim));
  const TestTensor dk = output(want.k, "dk", spec.output(), spec.keys_size(spec.dim));
  const TestTensor dv = output(want.v, "dv", spec.output(), spec.keys_size(spec.value_dim));
  const TestTensor dridge = output(want.ridge_or_x && !given_x, "dridge", spec.ridge_dtype(), spec.ridge_size());
  const TestTensor dx = output(want.ridge_or_x && given_x, "dx", spec.output(), spec.rows_size(spec.dim));
  args.saved = saved.view();
  args.grad_o = grad_o.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  args.dridge = dridge.view();
  args.dx = dx.view();
  std::unique_ptr<InfoTensors> info;
  if (want.info) info = std::make_unique<InfoTensors>(spec, memory, args);
  Backward result;
  result.status = run_guarded(args, memory, lla_backward);
  if (result.status != LLA_OK) result.message = lla_last_error();
  operands.expect_intact();
  for (const TestTensor* t : {&saved, &grad_o, &dq, &dk, &dv, &dridge, &dx}) t->expect_intact();
  result.dq = dq.values();
  result.dk = dk.values();
  result.dv = dv.values();
  result.dridge = dridge.values();
  result.dx = dx.values();
  if (info) result.info = info->read();
  return result;
}

Forward oracle_forward(const Spec& spec, const Inputs& inputs) {
  return run_forward(as_oracle(spec), inputs, "reference");
}

Backward oracle_backward(const Spec& spec, const Inputs& inputs) {
  Spec f64 = as_oracle(spec);
  // The reference works the forward pass out again, so the saved vector only has to be there.
  const int64_t rows = f64.rows();
  const std::vector<double> saved(static_cast<size_t>(saved_layout(f64).saved_elements), 0.0);
  if (spec.ridge != RidgeShape::scalar && spec.ridge != RidgeShape::head) {
    return run_backward(f64, inputs, saved, "reference");
  }
  // By token first, then summed, to know what the sum is made of.
  const auto element = [&](size_t row) {
    return spec.ridge == RidgeShape::scalar ? 0 : row % static_cast<size_t>(spec.heads_q);
  };
  f64.ridge = RidgeShape::token;
  Inputs by_token = inputs;
  by_token.ridge.resize(static_cast<size_t>(rows));
  for (size_t row = 0; row < by_token.ridge.size(); ++row) by_token.ridge[row] = inputs.ridge[element(row)];
  Backward result = run_backward(f64, by_token, saved, "reference");
  std::vector<double> sums(inputs.ridge.size(), 0.0);
  double squares = 0;
  for (size_t row = 0; row < result.dridge.size(); ++row) {
    sums[element(row)] += result.dridge[row];
    squares += result.dridge[row] * result.dridge[row];
  }
  result.dridge_terms = std::exchange(result.dridge, sums);
  result.dridge_summands = std::sqrt(squares);
  return result;
}

std::vector<std::string> implementations_under_test() {
  std::vector<std::string> names;
  for (const core::Implementation* i : core::implementations()) {
    if (i->device == core::Device::cpu || cuda_memory() != nullptr) names.emplace_back(i->name);
  }
  return names;
}

Memory& memory_of(const std::string& implementation) {
  return find(implementation)->device == core::Device::cpu ? host_memory() : *cuda_memory();
}

namespace {

Tensor described(const Spec& spec, DType dtype, const std::vector<int64_t>& size, int device) {
  return described(dtype, size, spec.layout, device);
}

// Sizes, strides and options without data: enough for an answer.
template <class Args>
void describe(Args& args, const Spec& spec, int device) {
  args.options = spec.options;
  args.q = described(spec, spec.dtype, spec.rows_size(spec.dim), device);
  args.k = described(spec, spec.dtype, spec.keys_size(spec.dim), device);
  args.v = described(spec, spec.dtype, spec.keys_size(spec.value_dim), device);
  if (spec.ridge == RidgeShape::none) {
    args.x = described(spec, spec.given_dtype(), spec.rows_size(spec.dim), device);
  } else {
    args.ridge = described(spec, spec.ridge_dtype(), spec.ridge_size(), device);
  }
  if (spec.packed()) {
    args.cu_seqlens_q = args.cu_seqlens_k =
        described(DType::i32, {static_cast<int64_t>(spec.cu_q.size())}, Layout::dense, device);
  }
}

ForwardArgs describe_forward(const Spec& spec, int device) {
  ForwardArgs args;
  describe(args, spec, device);
  args.o = described(spec, spec.output(), spec.rows_size(spec.value_dim), device);
  return args;
}

}  // namespace

ForwardSizes saved_layout(const Spec& spec) {
  ForwardSizes sizes;
  const Status status = query(describe_forward(spec, -1), sizes);
  EXPECT_TRUE(status) << spec.text() << ": " << status.message();
  return sizes;
}

bool takes(const std::string& implementation, const Spec& spec, bool gradients) {
  const int device = memory_of(implementation).cuda_device();
  ForwardArgs forward = describe_forward(spec, device);
  forward.options.implementation = implementation.c_str();
  ForwardSizes sizes;
  lla_status status = lla_forward_query(&forward, &sizes);
  if (status == LLA_OK && gradients) {
    BackwardArgs backward;
    describe(backward, spec, device);
    backward.options.implementation = implementation.c_str();
    backward.saved = described(spec.ridge_dtype(), {sizes.saved_elements}, Layout::dense, device);
    backward.grad_o = described(spec, spec.dtype, spec.rows_size(spec.value_dim), device);
    backward.dq = described(spec, spec.output(), spec.rows_size(spec.dim), device);
    backward.dk = described(spec, spec.output(), spec.keys_size(spec.dim), device);
    backward.dv = described(spec, spec.output(), spec.keys_size(spec.value_dim), device);
    BackwardSizes backward_sizes;
    status = lla_backward_query(&backward, &backward_sizes);
  }
  if (find(implementation)->device == core::Device::cpu) {
    EXPECT_EQ(status, LLA_OK) << spec.text() << ": " << lla_last_error();
  } else {
    EXPECT_TRUE(status == LLA_OK || status == LLA_UNSUPPORTED) << spec.text() << ": " << lla_last_error();
  }
  return status == LLA_OK;
}

bool reduced() {
  const char* value = std::getenv("LLA_TEST_REDUCED");
  return value != nullptr && std::string(value) == "1";
}

}  // namespace lla::test
