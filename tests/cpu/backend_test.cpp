// The CPU backend against the reference: every data kind with both solvers and auto, and every SIMD target.
#include <gtest/gtest.h>

#include "cpu/cpu.hpp"
#include "each_target.hpp"
#include "support/compare.hpp"
#include "support/run.hpp"

namespace lla::test {
namespace {

class CpuForward : public testing::TestWithParam<data::Kind> {};

TEST_P(CpuForward, AgreesWithTheReferenceWhateverTheSolver) {
  for (const double ridge : {1.0, 0.01}) {
    for (const int64_t dim : {16, 37, 64}) {
      for (const lla_solver solver : {LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT}) {
        Spec spec = self_attention(reduced() ? 70 : 300, dim);
        spec.options.solver = solver;
        spec.options.tolerance = 1e-6;
        spec.options.max_iterations = 1000;
        const Inputs inputs = make_inputs(spec, GetParam(), ridge, 1);
        const Forward got = run_forward(spec, inputs, "cpu");
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        const Error error = compare(spec, Side::queries, spec.value_dim, got.o, oracle_forward(spec, inputs).o);
        EXPECT_LE(error.norm, ridge == 1.0 ? 2e-5 : 1e-3) << spec.text() << " ridge " << ridge << ": " << error.text();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, CpuForward, testing::ValuesIn(data::kinds),
                         [](const auto& info) { return std::string(data::name(info.param)); });

TEST(CpuTargets, AllComputeTheSameUpToRounding) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    Spec spec = self_attention(reduced() ? 40 : 110, 20, 4);
    spec.heads_kv = 2;
    spec.value_dim = 9;
    spec.dtype = dtype;
    spec.ridge = RidgeShape::dimension;
    spec.options.tolerance = dtype == DType::f64 ? 1e-13 : 1e-6;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 2);
    const Forward want = oracle_forward(spec, inputs);
    const Backward want_gradients = oracle_backward(spec, inputs);
    const double gate = dtype == DType::f64 ? 1e-10 : 1e-4;
    on_each_target([&](const char* target) {
      EXPECT_EQ(cpu::simd_target_name(), target);
      const Forward got = run_forward(spec, inputs, "cpu");
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      EXPECT_LE(compare(spec, Side::queries, spec.value_dim, got.o, want.o).norm, gate) << target;
      const Backward gradients = run_backward(spec, inputs, "cpu");
      EXPECT_LE(compare(spec, Side::queries, spec.dim, gradients.dq, want_gradients.dq).norm, gate) << target;
      EXPECT_LE(compare(spec, Side::keys, spec.dim, gradients.dk, want_gradients.dk).norm, gate) << target;
      EXPECT_LE(compare(spec, Side::keys, spec.value_dim, gradients.dv, want_gradients.dv).norm, gate) << target;
      EXPECT_LE(relative_error(gradients.dridge, want_gradients.dridge), gate) << target;
    });
  }
}

// Where one key has all the weight but a millionth of a millionth, gradients live in the last digits of everything
// centred.
TEST(CpuBackward, ResolvesRowsWithOneDominantKey) {
  Spec spec = self_attention(64, 128);
  spec.options.tolerance = 1e-6;
  const Inputs inputs = make_inputs(spec, data::Kind::self, 1.0, 3);
  const Backward want = oracle_backward(spec, inputs), got = run_backward(spec, inputs, "cpu");
  EXPECT_LE(compare(spec, Side::queries, spec.dim, got.dq, want.dq).norm, 1e-4);
  EXPECT_LE(compare(spec, Side::keys, spec.dim, got.dk, want.dk).norm, 1e-4);
}

// A large common mean of the keys: what is centred is small against what it is the difference of.
TEST(CpuBackend, StandsALargeMeanOfTheKeys) {
  Spec spec = self_attention(reduced() ? 60 : 200, 64);
  spec.options.tolerance = 1e-6;
  Inputs inputs = make_inputs(spec, data::Kind::randn, 1.0, 4);
  for (size_t i = 0; i < inputs.k.size(); ++i) inputs.k[i] += i % 64 < 32 ? 30.0 : -30.0;
  for (double& k : inputs.k) k = static_cast<float>(k);
  const Forward want = oracle_forward(spec, inputs), got = run_forward(spec, inputs, "cpu");
  EXPECT_LE(compare(spec, Side::queries, spec.value_dim, got.o, want.o).norm, 2e-4);
}

}  // namespace
}  // namespace lla::test
