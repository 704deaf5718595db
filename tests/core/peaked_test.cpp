// What trained attention asks of every implementation: rows that look at few keys, keys with common means and outlier
// channels, tiny ridges. Outputs and gradients at the default options, and the promise behind them: a row that says OK
// has the residual it says, and an output that is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/text.hpp"
#include "support/conditioned.hpp"
#include "support/gates.hpp"
#include "support/truth.hpp"

namespace lla::test {
namespace {

std::vector<std::string> tested() {
  std::vector<std::string> names = implementations_under_test();
  std::erase(names, "reference");  // it is the oracle
  return names;
}

Spec defaults(int64_t length, int64_t dim, DType dtype) {
  Spec spec = self_attention(length, dim);
  spec.dtype = dtype;
  spec.out_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;  // the error, not the rounding of a 16-bit output
  return spec;
}

std::string context(data::Kind kind, double ridge) {
  return std::string(data::name(kind)) + ", ridge " + std::to_string(ridge);
}

// Worst of a row's channels against the row's largest value, or 1.
std::vector<double> row_errors(const Spec& spec, const std::vector<double>& got, const std::vector<double>& want) {
  std::vector<double> errors;
  for (size_t at = 0; at < want.size(); at += static_cast<size_t>(spec.value_dim)) {
    double error = 0, size = 1;
    for (size_t c = at; c < at + static_cast<size_t>(spec.value_dim); ++c) {
      error = std::isfinite(got[c]) ? std::max(error, std::abs(got[c] - want[c])) : HUGE_VAL;
      size = std::max(size, 1 + std::abs(want[c]));
    }
    errors.push_back(error / size);
  }
  return errors;
}

// ---- the promise of a status ---------------------------------------------------------------------------------------

// One head: rows of o are in the order of the info outputs. Keys are taken times a power of two, which stays exact.
void expect_truth(const Spec& spec, data::Kind kind, double ridge, double key_factor = 1) {
  SCOPED_TRACE(context(kind, ridge) + ", keys times " + std::to_string(key_factor) + ", " + spec.text());
  Inputs inputs = make_inputs(spec, kind, ridge, 5);
  for (double& k : inputs.k) k *= key_factor;
  const Forward want = oracle_forward(spec, inputs);
  for (const std::string& name : tested()) {
    if (!takes(name, spec)) continue;
    SCOPED_TRACE(name);
    const Forward got = run_forward(spec, inputs, name);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    const std::vector<double> residuals = true_residuals(spec, inputs, got.saved);
    const std::vector<double> errors = row_errors(spec, got.o, want.o);
    for (size_t i = 0; i < residuals.size(); ++i) {
      if (got.info.status[i] != LLA_ROW_OK) continue;
      EXPECT_LE(errors[i], 1e-2) << "row " << i << " says OK";
      // -1: solved directly, nothing is claimed but the status.
      if (got.info.residual[i] < 0) continue;
      EXPECT_LE(residuals[i], 2 * got.info.residual[i]) << "row " << i;
    }
  }
}

class ResidualTruth : public testing::TestWithParam<data::Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ResidualTruth,
                         testing::Values(data::Kind::randn, data::Kind::mean, data::Kind::mean10, data::Kind::mean30,
                                         data::Kind::long_both, data::Kind::qk_norm, data::Kind::queries6,
                                         data::Kind::queries20, data::Kind::two_channels, data::Kind::rope,
                                         data::Kind::sink),
                         [](const auto& info) { return data::name(info.param); });

TEST_P(ResidualTruth, OfOkRowsF32) {
  for (const double ridge : {1e-3, 0.01, 0.1})
    expect_truth(defaults(140, 64, DType::f32), GetParam(), ridge);  // at 60 keys *mean* has a row of 7.4e-6 for 3.1e-6
  if (!reduced()) expect_truth(defaults(140, 128, DType::f32), GetParam(), 1e-3);
}

TEST_P(ResidualTruth, OfOkRowsOfConjugateGradients) {
  Spec spec = defaults(reduced() ? 60 : 140, 64, DType::f32);
  spec.options.solver = LLA_SOLVER_CG;
  expect_truth(spec, GetParam(), 1e-3);
  expect_truth(spec, GetParam(), 0.1);
}

TEST_P(ResidualTruth, OfOkRowsInHalfTypes) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    expect_truth(defaults(reduced() ? 60 : 140, 64, dtype), GetParam(), 1e-3);
    if (!reduced()) expect_truth(defaults(140, 128, dtype), GetParam(), 0.01);
  }
}

TEST_P(ResidualTruth, OfOkRowsInF64) { expect_truth(defaults(reduced() ? 60 : 100, 64, DType::f64), GetParam(), 1e-3); }

// Logits in the hundreds and thousands, of which float hides more than a residual of the tolerance: such a row is
// solved directly, or says that it has no solution.
TEST_P(ResidualTruth, OfOkRowsWithHugeLogits) {
  for (const auto solver : {LLA_SOLVER_AUTO, LLA_SOLVER_CG}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Spec spec = defaults(reduced() ? 40 : 100, 64, dtype);
      spec.options.solver = solver;
      for (const double ridge : {1e-3, 0.1}) expect_truth(spec, GetParam(), ridge, 4);
    }
  }
}

// x is as long as the ridge is small; its rounding alone would spoil the output.
TEST(TinyRidge, OkRowsAreRight) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double ridge : {1e-8, 1e-7, 1e-6, 1e-5, 1e-4}) {
      expect_truth(defaults(reduced() ? 60 : 128, 16, dtype), data::Kind::randn, ridge);
      expect_truth(defaults(reduced() ? 40 : 128, 64, dtype), data::Kind::randn, ridge);
    }
  }
}

TEST(ChannelScales, OkRowsAreRight) {
  for (const double ridge : {1e-3, 0.1}) {
    expect_truth(defaults(100, 32, DType::f32), data::Kind::channel_scales, ridge);
    expect_truth(defaults(100, 64, DType::f32), data::Kind::channel_scales, ridge);
  }
}

// ---- accuracy at the defaults --------------------------------------------------------------------------------------

// One ridge's gradient is a sum over rows and channels. Where that cancels below a thirtieth of its summands, they are
// the scale of its error.
void scale_ridge_error(const Spec& spec, const Inputs& inputs, Backward& want) {
  Spec by_channel = spec;
  by_channel.ridge = RidgeShape::dimension;
  Inputs expanded = inputs;
  expanded.ridge.assign(static_cast<size_t>(spec.rows() * spec.dim), inputs.ridge[0]);
  double summands = 0;
  for (const double part : oracle_backward(by_channel, expanded).dridge) summands += std::abs(part);
  const double own = std::abs(want.dridge[0]);
  want.dridge_summands = own < summands / 30 ? summands : own;
}

void expect_accurate(const Spec& spec, data::Kind kind, double ridge, Gates gates) {
  SCOPED_TRACE(context(kind, ridge) + ", " + spec.text());
  const Inputs inputs = make_inputs(spec, kind, ridge, 1);
  const Forward want = oracle_forward(spec, inputs);
  Backward want_gradients = oracle_backward(spec, inputs);
  scale_ridge_error(spec, inputs, want_gradients);
  for (const std::string& name : tested()) {
    if (!takes(name, spec, true)) continue;
    SCOPED_TRACE(name);
    const Forward got = run_forward(spec, inputs, name);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    expect_output(spec, got.o, want.o, gates.output);
    const Backward gradients = run_backward(spec, inputs, got.saved, name);
    ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
    expect_gradients(spec, gradients, want_gradients, gates.gradient);
  }
}

// docs/math.md: what follows from a residual of the default tolerance.
Gates default_gates(double ridge) { return {3e-3, ridge >= 0.1 ? 1e-2 : 3e-2}; }

class Peaked : public testing::TestWithParam<data::Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Peaked, testing::ValuesIn(data::peaked_kinds),
                         [](const auto& info) { return data::name(info.param); });

TEST_P(Peaked, OutputsAtTheDefaults) {
  for (const double ridge : {1.0, 0.1, 0.01}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Spec spec = defaults(reduced() ? 80 : 160, 64, dtype);
      const Inputs inputs = make_inputs(spec, GetParam(), ridge, 1);
      const Forward want = oracle_forward(spec, inputs);
      for (const std::string& name : tested()) {
        if (!takes(name, spec)) continue;
        SCOPED_TRACE(name + ", " + context(GetParam(), ridge));
        expect_output(spec, run_forward(spec, inputs, name).o, want.o, default_gates(ridge).output);
      }
    }
  }
}

TEST_P(Peaked, GradientsAtTolerance1e4) {
  for (const double ridge : {0.1, 0.01}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Spec spec = defaults(128, 64, dtype);  // channel_scales misses the gate at 80: dk 4.7e-2 for 3e-2, bf16
      spec.options.tolerance = 1e-4;
      expect_accurate(spec, GetParam(), ridge, default_gates(ridge));
    }
  }
}

// Ordinary data, most of all where a row sees 1 to 2 D keys.
class DefaultGradients : public testing::TestWithParam<data::Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, DefaultGradients, testing::ValuesIn(data::kinds),
                         [](const auto& info) { return data::name(info.param); });

TEST_P(DefaultGradients, AreAccurate) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double ridge : {1.0, 0.1, 0.01}) {
      expect_accurate(defaults(128, 64, dtype), GetParam(), ridge, default_gates(ridge));
      if (GetParam() != data::Kind::randn) continue;
      for (const int64_t keys : {2, 5, 17, 64, 128}) {
        Spec spec = defaults(1, 64, dtype);
        spec.length_k = keys;
        expect_accurate(spec, GetParam(), ridge, default_gates(ridge));
      }
    }
  }
}

TEST(DefaultGradientsF64, AreAccurate) {
  for (const int solver : {LLA_SOLVER_AUTO, LLA_SOLVER_CG}) {
    Spec spec = defaults(64, 64, DType::f64);
    spec.options.solver = solver;
    expect_accurate(spec, data::Kind::randn, 0.01, {1e-6, 1e-6});
  }
}

// Rows that look at one key so hard that 1e-20 of what their gradients are made of is left. It can be known to ten
// digits, by whoever has weights that sum to what they are divided by, to the last bit.
TEST(OneHeavyKey, GradientsThatNearlyCancelKeepTheirDigits) {
  for (const uint64_t seed : {3065, 1, 2}) {
    Spec spec = defaults(16, 128, DType::f64);
    spec.heads_q = spec.heads_kv = 2;
    spec.value_dim = 55;
    spec.options.causal = 0;
    spec.options.scale = 0.15;
    spec.options.tolerance = tight_tolerance(DType::f64);
    const Inputs inputs = make_inputs(spec, data::Kind::channel_scales, 1, seed);
    const Truth truth(spec, inputs);
    for (const std::string& name : tested()) {
      if (!takes(name, spec, true)) continue;
      SCOPED_TRACE(core::cat(name, ", seed ", seed));
      const Backward got = run_backward(spec, inputs, name);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      const double gate = 5 * accuracy_gates(DType::f64, 1).gradient;
      expect_close({"dq", got.dq, truth.backward.dq, truth.moved_backward.dq, DType::f64}, gate);
      expect_close({"dk", got.dk, truth.backward.dk, truth.moved_backward.dk, DType::f64}, gate);
    }
  }
}

// One key 300 times as long as the others and a small ridge: what is left of the covariance where it has all the weight
// is to be less than the ridge, and is the difference of numbers 1e8 times as large to whoever forms it about any other
// point.
TEST(OneLargeKey, F64KeepsItsDigits) {
  for (const uint64_t seed : {600669, 1, 2}) {
    Spec spec = defaults(3, 64, DType::f64);
    spec.length_k = 75;
    spec.heads_q = 9;
    spec.heads_kv = 3;
    spec.options.tolerance = tight_tolerance(DType::f64);
    spec.options.max_iterations = 1480;
    const Inputs inputs = make_inputs(spec, data::Kind::one_large_key, 0.1, seed);
    const Truth truth(spec, inputs);
    const double gate = 20 * accuracy_gates(DType::f64, 1).gradient;
    for (const std::string& name : tested()) {
      if (!takes(name, spec, true)) continue;
      SCOPED_TRACE(core::cat(name, ", seed ", seed));
      const Forward got = run_forward(spec, inputs, name);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      const Backward gradients = run_backward(spec, inputs, got.saved, name);
      ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
      expect_close({"o", got.o, truth.forward.o, truth.moved.o, DType::f64}, gate);
      expect_close({"dq", gradients.dq, truth.backward.dq, truth.moved_backward.dq, DType::f64}, gate);
      expect_close({"dk", gradients.dk, truth.backward.dk, truth.moved_backward.dk, DType::f64}, gate);
    }
  }
}

// Keys far from the origin, every way to solve and x given. The tolerance is tight and a row that gives up is taken at
// its word, so what is left is rounding: products with keys that were not shifted would be off by |x| |mean| units.
void expect_gradients_far_from_origin(const Spec& spec, data::Kind kind, double ridge) {
  SCOPED_TRACE(context(kind, ridge) + ", " + spec.text());
  const Inputs inputs = make_inputs(spec, kind, ridge, 7);
  const Truth truth(spec, inputs);
  for (const std::string& name : tested()) {
    if (!takes(name, spec, true)) continue;
    SCOPED_TRACE(name);
    const Forward got = run_forward(spec, inputs, name);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    const Backward gradients = run_backward(spec, inputs, got.saved, name);
    ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
    bool solved = true;
    for (const RowInfo* info : {&got.info, &gradients.info}) {
      for (const int status : info->status) solved &= status == LLA_ROW_OK;
    }
    if (!solved) continue;
    const Backward &want = truth.backward, &moved = truth.moved_backward;
    const Gates gates = default_gates(ridge);
    expect_close({"o", got.o, truth.forward.o, truth.moved.o, spec.output()}, gates.output);
    expect_close({"dq", gradients.dq, want.dq, moved.dq, spec.output()}, gates.gradient);
    expect_close({"dk", gradients.dk, want.dk, moved.dk, spec.output()}, gates.gradient);
    expect_close({"dv", gradients.dv, want.dv, moved.dv, spec.output()}, gates.gradient);
    expect_close({"dx", gradients.dx, want.dx, moved.dx, spec.output()}, gates.gradient);
  }
}

class FarFromOrigin : public testing::TestWithParam<data::Kind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, FarFromOrigin,
                         testing::Values(data::Kind::mean, data::Kind::mean10, data::Kind::mean30),
                         [](const auto& info) { return data::name(info.param); });

// Rows before the first key have no mean that could be far from anything.
TEST_P(FarFromOrigin, RowsWithoutKeys) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    for (const int64_t dim : {64, 128}) {
      Spec spec = defaults(21, dim, dtype);
      spec.length_k = 9;
      spec.ridge = RidgeShape::token;
      const Inputs inputs = make_inputs(spec, GetParam(), 0.1, 7);
      for (const std::string& name : tested()) {
        if (!takes(name, spec, true)) continue;
        SCOPED_TRACE(name + ", " + spec.text());
        const Backward got = run_backward(spec, inputs, name);
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        for (const auto* gradient : {&got.dq, &got.dk, &got.dv, &got.dridge}) EXPECT_TRUE(all_finite(*gradient));
        for (int64_t e = 0; e < 12 * dim; ++e) ASSERT_EQ(got.dq[static_cast<size_t>(e)], 0) << "element " << e;
        for (size_t row = 0; row < 12; ++row) EXPECT_EQ(got.dridge[row], 0) << "row " << row;
      }
    }
  }
}

TEST_P(FarFromOrigin, GradientsAreAccurate) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const int solver : {LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT}) {
      for (const auto& [keys, dim] : {std::pair<int64_t, int64_t>{13, 128}, {96, 64}}) {
        Spec spec = defaults(keys, dim, dtype);
        spec.options.solver = solver;
        spec.options.tolerance = tight_tolerance(dtype);
        spec.options.max_iterations = static_cast<int32_t>(20 * dim);
        for (const double ridge : {0.1, 0.01}) expect_gradients_far_from_origin(spec, GetParam(), ridge);
        if (solver != LLA_SOLVER_AUTO) continue;
        spec.ridge = RidgeShape::none;
        expect_gradients_far_from_origin(spec, GetParam(), 0.1);
      }
    }
  }
}

// ---- the range of the type -----------------------------------------------------------------------------------------

TEST(Range, HugeValuesAreRightOrReported) {
  for (const auto& [dtype, huge] :
       {std::pair{DType::f32, 1e37}, std::pair{DType::f32, 3e38}, std::pair{DType::f64, 1e307}}) {
    const Spec spec = defaults(40, 16, dtype);
    Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 3);
    for (double& v : inputs.v) v = rounded(huge * std::clamp(v, -1.0, 1.0), dtype);
    for (const std::string& name : implementations_under_test()) {
      if (!takes(name, spec)) continue;
      SCOPED_TRACE(name);
      const Forward got = run_forward(spec, inputs, name);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      for (int64_t i = 0; i < spec.length_q; ++i) {
        const auto row = got.o.begin() + i * spec.value_dim;
        const bool finite = std::all_of(row, row + spec.value_dim, [](double x) { return std::isfinite(x); });
        EXPECT_TRUE(finite || got.info.status[static_cast<size_t>(i)] != LLA_ROW_OK) << "row " << i;
      }
    }
  }
}

// ---- defaults ------------------------------------------------------------------------------------------------------

TEST(Defaults, ToleranceIsThatOfTheType) {
  for (const auto& [dtype, tolerance] : {std::pair{DType::bf16, 1e-3}, std::pair{DType::f16, 1e-3},
                                         std::pair{DType::f32, 1e-4}, std::pair{DType::f64, 1e-9}}) {
    Spec spec = defaults(100, 64, dtype);
    spec.options.solver = LLA_SOLVER_CG;
    Spec named = spec;
    named.options.tolerance = tolerance;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 3);
    for (const std::string& name : implementations_under_test()) {
      if (!takes(name, spec)) continue;
      EXPECT_EQ(run_forward(spec, inputs, name).info.iterations, run_forward(named, inputs, name).info.iterations)
          << name;
    }
  }
}

}  // namespace
}  // namespace lla::test
