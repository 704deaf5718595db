// What accuracy is asked of a result, in one place. docs/testing.md says where the numbers come from.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <stdexcept>
#include <string>

#include "support/compare.hpp"
#include "support/run.hpp"

namespace lla::test {

// Stop rule of conjugate gradients tight enough for the gates of a type.
inline double tight_tolerance(DType dtype) { return dtype == DType::f64 ? 1e-13 : 1e-6; }

struct Gates {
  double output = 0;
  double gradient = 0;
};

// Against the fp64 oracle on inputs exact in the type, ridge at least `ridge` with keys of unit variance, and the tight
// tolerance.
inline Gates accuracy_gates(DType dtype, double ridge) {
  switch (dtype) {
    case DType::f64: return {1e-10, 1e-10};
    case DType::f32: return ridge >= 1 ? Gates{2e-5, 1e-4} : ridge >= 0.1 ? Gates{2e-4, 1e-3} : Gates{1e-3, 1e-2};
    default: return ridge >= 0.1 ? Gates{4e-3, 8e-3} : Gates{4e-3, 1.6e-2};  // the rounding of 16-bit outputs dominates
  }
}

// Between two runs of the same implementation that may only differ in the order of additions.
inline double rounding_gate(DType dtype) { return dtype == DType::f64 ? 1e-10 : dtype == DType::f32 ? 2e-5 : 8e-3; }

// A sum over rows is as accurate as the rows are, not as their cancelled sum: where the oracle says what was summed,
// that is the scale.
inline double ridge_error(const Backward& got, const Backward& want) {
  if (want.dridge_summands == 0) return relative_error(got.dridge, want.dridge);
  double squares = 0;
  for (size_t i = 0; i < want.dridge.size(); ++i) squares += std::pow(got.dridge.at(i) - want.dridge[i], 2);
  return std::sqrt(squares) / want.dridge_summands;
}

inline void expect_output(const Spec& spec, const std::vector<double>& got, const std::vector<double>& want,
                          double gate) {
  const Error error = compare(spec, Side::queries, spec.value_dim, got, want);
  EXPECT_LE(error.norm, gate) << "o, " << spec.text();
}

inline void expect_gradients(const Spec& spec, const Backward& got, const Backward& want, double gate) {
  constexpr double kFloor = 1e-2;
  const auto error = [&](Side side, int64_t channels, const std::vector<double>& a, const std::vector<double>& b) {
    return compare(spec, side, channels, a, b, kFloor).norm;
  };
  EXPECT_LE(error(Side::queries, spec.dim, got.dq, want.dq), gate) << "dq, " << spec.text();
  EXPECT_LE(error(Side::keys, spec.dim, got.dk, want.dk), gate) << "dk, " << spec.text();
  EXPECT_LE(error(Side::keys, spec.value_dim, got.dv, want.dv), gate) << "dv, " << spec.text();
  if (spec.ridge == RidgeShape::none) {
    EXPECT_LE(error(Side::queries, spec.dim, got.dx, want.dx), gate) << "dx, " << spec.text();
  } else {
    EXPECT_LE(ridge_error(got, want), gate) << "dridge, " << spec.text();
  }
}

// Names of parametrised tests may hold letters, digits and underscores only.
inline std::string test_name(std::string name) {
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

// Tests that run on each implementation of this binary by name.
class EachImplementation : public testing::TestWithParam<std::string> {
 protected:
  // Runs; a refusal ends the test.
  Forward forward(const Spec& spec, const Inputs& inputs) const {
    Forward result = run_forward(spec, inputs, GetParam());
    if (result.status != LLA_OK) throw std::runtime_error(result.message + ", " + spec.text());
    return result;
  }
  Backward backward(const Spec& spec, const Inputs& inputs) const {
    Backward result = run_backward(spec, inputs, GetParam());
    if (result.status != LLA_OK) throw std::runtime_error(result.message + ", " + spec.text());
    return result;
  }
  bool takes(const Spec& spec) const { return test::takes(GetParam(), spec); }
};

#define LLA_EACH_IMPLEMENTATION(suite)                                                              \
  INSTANTIATE_TEST_SUITE_P(Implementations, suite, testing::ValuesIn(implementations_under_test()), \
                           [](const auto& info) { return test_name(info.param); })

}  // namespace lla::test
