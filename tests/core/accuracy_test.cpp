// Every implementation against the fp64 oracle on the six data kinds and on awkward shapes. The gates are those of
// docs/testing.md.
#include <gtest/gtest.h>

#include "support/gates.hpp"

namespace lla::test {
namespace {

// The worst row may be this much worse than the gate on the head as a whole.
constexpr double kRowFactor = 10;

std::vector<std::string> tested() {
  std::vector<std::string> names = implementations_under_test();
  std::erase(names, "reference");  // it is the oracle
  return names;
}

// Runs every implementation on the problem; the oracle is worked out once.
void expect_accurate(const Spec& spec, data::Kind kind, double ridge, Gates gates, bool gradients) {
  SCOPED_TRACE(std::string(data::name(kind)) + ", ridge " + std::to_string(ridge));
  const Inputs inputs = make_inputs(spec, kind, ridge, 1);
  const Forward want = oracle_forward(spec, inputs);
  const Backward want_gradients = gradients ? oracle_backward(spec, inputs) : Backward();
  for (const std::string& name : tested()) {
    if (!takes(name, spec, gradients)) continue;
    const Forward got = run_forward(spec, inputs, name);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    const Error error = compare(spec, Side::queries, spec.value_dim, got.o, want.o);
    EXPECT_LE(error.norm, gates.output) << name << ", o, " << spec.text();
    EXPECT_LE(error.row, kRowFactor * gates.output) << name << ", worst row of o, " << spec.text();
    if (!gradients) continue;
    SCOPED_TRACE(name);
    const Backward got_gradients = run_backward(spec, inputs, got.saved, name);
    ASSERT_EQ(got_gradients.status, LLA_OK) << got_gradients.message;
    expect_gradients(spec, got_gradients, want_gradients, gates.gradient);
  }
}

class Accuracy : public testing::TestWithParam<data::Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Accuracy, testing::ValuesIn(data::kinds),
                         [](const auto& info) { return data::name(info.param); });

Spec causal(int64_t length, int64_t dim, DType dtype) {
  Spec spec = self_attention(length, dim);
  spec.dtype = dtype;
  spec.options.tolerance = tight_tolerance(dtype);
  return spec;
}

// The first rows of a head, most of which see fewer than 2 D keys.
TEST_P(Accuracy, EarlyRowsF32) {
  for (const double ridge : {1.0, 0.1, 0.01}) {
    expect_accurate(causal(reduced() ? 100 : 256, 64, DType::f32), GetParam(), ridge, accuracy_gates(DType::f32, ridge),
                    true);
    if (!reduced())
      expect_accurate(causal(160, 128, DType::f32), GetParam(), ridge, accuracy_gates(DType::f32, ridge), true);
  }
}

// The last rows of a long one.
TEST_P(Accuracy, LateRowsF32) {
  for (const int64_t dim : {64, 128}) {
    for (const double ridge : {1.0, 0.01}) {
      Spec spec = causal(32, dim, DType::f32);
      spec.length_k = reduced() ? 256 : 1024;
      expect_accurate(spec, GetParam(), ridge, accuracy_gates(DType::f32, ridge), true);
    }
  }
}

TEST_P(Accuracy, EverySolverF32) {
  for (const int solver : {LLA_SOLVER_CG, LLA_SOLVER_DIRECT}) {
    for (const double ridge : {1.0, 0.01}) {
      Spec spec = causal(reduced() ? 80 : 150, 64, DType::f32);
      spec.options.solver = solver;
      expect_accurate(spec, GetParam(), ridge, accuracy_gates(DType::f32, ridge), true);
    }
  }
}

TEST_P(Accuracy, HalfTypesAtTheDefaultTolerance) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128}) {
      for (const double ridge : {1.0, 0.1, 0.01}) {
        Spec spec = causal(reduced() ? 80 : 144, dim, dtype);
        spec.options.tolerance = 1e-3;
        expect_accurate(spec, GetParam(), ridge, {4e-3, 0}, false);
      }
    }
  }
}

TEST_P(Accuracy, HalfTypesGradients) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const double ridge : {1.0, 0.01}) {
      expect_accurate(causal(reduced() ? 80 : 130, 64, dtype), GetParam(), ridge, accuracy_gates(dtype, ridge), true);
    }
  }
}

TEST_P(Accuracy, F64) {
  for (const int solver : {LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT}) {
    for (const double ridge : {1.0, 0.01}) {
      Spec spec = causal(reduced() ? 80 : 130, 64, DType::f64);
      spec.options.solver = solver;
      spec.options.tolerance = 1e-13;
      expect_accurate(spec, GetParam(), ridge, {1e-10, 1e-10}, true);
    }
  }
}

// ---- shapes --------------------------------------------------------------------------------------------------------

TEST(Shapes, LengthsAroundTheBlocks) {
  for (const int64_t length : {1, 2, 63, 65, 127, 129}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      Spec spec = causal(length, 24, dtype);
      spec.heads_q = 2;
      spec.value_dim = 20;
      spec.ridge = RidgeShape::token;
      expect_accurate(spec, data::Kind::randn, 0.5, accuracy_gates(dtype, 0.1), true);
      spec.options.causal = 0;
      spec.length_k = 130 - length;
      expect_accurate(spec, data::Kind::randn, 0.5, accuracy_gates(dtype, 0.1), true);
    }
  }
}

TEST(Shapes, HeadDimensions) {
  for (const int64_t dim : {1, 2, 3, 5, 7, 31, 33, 80, 96, 200, 256}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      if (reduced() && dim > 96) continue;
      Spec spec = causal(dim > 100 ? 40 : 70, dim, dtype);
      spec.value_dim = dim == 256 ? 1 : 256 - dim;
      spec.ridge = RidgeShape::dimension;
      expect_accurate(spec, data::Kind::randn, 0.5, accuracy_gates(dtype, 0.1), true);
      spec.ridge = RidgeShape::none;
      spec.value_dim = dim;
      // A given x of unit-free size 0.3 makes (k - mean).x grow with D, and the rounding with it.
      expect_accurate(spec, data::Kind::randn, 0, accuracy_gates(dtype, 0.1), true);
    }
  }
}

TEST(Shapes, Windows) {
  for (const auto& [left, right] :
       {std::pair{0, 0}, std::pair{1, 0}, std::pair{7, 3}, std::pair{0, 5}, std::pair{63, 1}, std::pair{64, 64},
        std::pair{-1, 2}, std::pair{2, -1}, std::pair{1000, 1000}}) {
    for (const auto& [length_q, length_k] : {std::pair{140, 140}, std::pair{33, 140}, std::pair{140, 33}}) {
      Spec spec = causal(length_q, 8, DType::f32);
      spec.length_k = length_k;
      spec.options.causal = 0;
      spec.options.window_left = left;
      spec.options.window_right = right;
      expect_accurate(spec, data::Kind::randn, 0.5, accuracy_gates(DType::f32, 0.1), true);
      spec.options.causal = 1;
      expect_accurate(spec, data::Kind::randn, 0.5, accuracy_gates(DType::f32, 0.1), true);
    }
  }
}

TEST(Shapes, ScalesOfTheLogits) {
  for (const double scale : {0.0, 1e-3, 1.0, -0.5, 4.0}) {
    Spec spec = causal(100, 16, DType::f32);
    spec.options.scale = scale;
    expect_accurate(spec, data::Kind::randn, 1, accuracy_gates(DType::f32, 1), true);
  }
}

TEST(Shapes, LargeAndSmallKeys) {  // the ridge scales with the square of the keys
  for (const double size : {1e-6, 1e-3, 1e3, 1e6}) {
    Spec spec = causal(100, 16, DType::f32);
    spec.options.scale = 0.25 / (size * size);
    Inputs inputs = make_inputs(spec, data::Kind::randn, size * size, 2);
    for (auto* t : {&inputs.q, &inputs.k}) {
      for (double& value : *t) value = rounded(value * size, DType::f32);
    }
    const Forward want = oracle_forward(spec, inputs);
    for (const std::string& name : tested()) {
      if (!takes(name, spec)) continue;
      expect_output(spec, run_forward(spec, inputs, name).o, want.o, accuracy_gates(DType::f32, 1).output);
    }
  }
}

// The defaults alone: tolerance 1e-3 is a statement about the residual, and a good one about the output.
TEST(Defaults, AreAccurateEnough) {
  for (const data::Kind kind : data::kinds) {
    Spec spec = self_attention(200, 64);
    expect_accurate(spec, kind, 0.1, {4e-3, 2e-2}, true);
  }
}

}  // namespace
}  // namespace lla::test
