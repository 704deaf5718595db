// Every golden case on every implementation, forward and gradients. fp64 is held to 1e-10, which pins the conventions;
// shorter types see the same inputs rounded and are compared with the oracle on those.
#include <gtest/gtest.h>

#include "support/compare.hpp"
#include "support/golden.hpp"

namespace lla::test {
namespace {

class Golden : public testing::TestWithParam<std::string> {};

constexpr double kF64 = 1e-10;

void expect_gradients(const Spec& spec, const Backward& got, const Backward& want, double gate) {
  EXPECT_LE(compare(spec, Side::queries, spec.dim, got.dq, want.dq).row, gate) << "dq";
  EXPECT_LE(compare(spec, Side::keys, spec.dim, got.dk, want.dk).row, gate) << "dk";
  EXPECT_LE(compare(spec, Side::keys, spec.value_dim, got.dv, want.dv).row, gate) << "dv";
  EXPECT_LE(relative_error(got.dridge, want.dridge), gate) << "dridge";
  if (spec.ridge == RidgeShape::none) {
    EXPECT_LE(compare(spec, Side::queries, spec.dim, got.dx, want.dx).row, gate) << "dx";
  }
}

Inputs rounded_inputs(const Spec& spec, Inputs in) {
  for (auto* t : {&in.q, &in.k, &in.v, &in.x, &in.grad_o}) *t = rounded(std::move(*t), spec.dtype);
  in.ridge = rounded(std::move(in.ridge), DType::f32);
  return in;
}

TEST_P(Golden, F64) {
  for (const int solver : {LLA_SOLVER_DIRECT, LLA_SOLVER_CG, LLA_SOLVER_AUTO}) {
    for (GoldenCase c : golden_cases()) {
      c.spec.options.solver = solver;
      c.spec.options.tolerance = 1e-13;
      if (!takes(GetParam(), c.spec)) continue;
      SCOPED_TRACE(c.name + ", solver " + std::to_string(solver));
      const Forward forward = run_forward(c.spec, c.inputs, GetParam());
      ASSERT_EQ(forward.status, LLA_OK) << forward.message;
      EXPECT_LE(compare(c.spec, Side::queries, c.spec.value_dim, forward.o, c.o).row, kF64);
      const Backward backward = run_backward(c.spec, c.inputs, forward.saved, GetParam());
      ASSERT_EQ(backward.status, LLA_OK) << backward.message;
      expect_gradients(c.spec, backward, c.gradients, kF64);
    }
  }
}

struct Gate {
  DType dtype;
  double output, gradient;
};

TEST_P(Golden, ShorterTypes) {
  for (const Gate& gate : {Gate{DType::f32, 1e-5, 1e-4}, Gate{DType::bf16, 8e-3, 2e-2}, Gate{DType::f16, 2e-3, 4e-3}}) {
    for (GoldenCase c : golden_cases()) {
      c.spec.dtype = gate.dtype;
      c.spec.options.tolerance = 1e-6;
      if (!takes(GetParam(), c.spec)) continue;
      SCOPED_TRACE(c.name);
      const Inputs inputs = rounded_inputs(c.spec, c.inputs);
      const Forward forward = run_forward(c.spec, inputs, GetParam());
      ASSERT_EQ(forward.status, LLA_OK) << forward.message;
      EXPECT_LE(compare(c.spec, Side::queries, c.spec.value_dim, forward.o, oracle_forward(c.spec, inputs).o).norm,
                gate.output);
      const Backward backward = run_backward(c.spec, inputs, forward.saved, GetParam());
      ASSERT_EQ(backward.status, LLA_OK) << backward.message;
      expect_gradients(c.spec, backward, oracle_backward(c.spec, inputs), gate.gradient);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Implementations, Golden, testing::ValuesIn(implementations_under_test()),
                         [](const auto& info) {
                           return info.param == "cuda-portable" ? std::string("cuda_portable") : info.param;
                         });

}  // namespace
}  // namespace lla::test
