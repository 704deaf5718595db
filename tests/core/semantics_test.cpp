// What a row means: no key, one key, infinite, negative and NaN ridges, NaN and Inf in the inputs, rank-deficient rows,
// zero sizes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/text.hpp"
#include "support/gates.hpp"

namespace lla::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kAllTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr int kAllSolvers[] = {LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT};

class Semantics : public EachImplementation {};
LLA_EACH_IMPLEMENTATION(Semantics);

bool all_equal(const std::vector<double>& values, double wanted) {
  return std::all_of(values.begin(), values.end(), [&](double x) { return x == wanted; });
}
bool all_nan(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isnan(x); });
}
Spec with(Spec spec, DType dtype, int solver = LLA_SOLVER_AUTO) {
  spec.dtype = dtype;
  spec.options.solver = solver;
  spec.options.tolerance = tight_tolerance(dtype);
  return spec;
}

// ---- few keys ------------------------------------------------------------------------------------------------------

TEST_P(Semantics, RowsWithoutKeysAreZeroAndSoAreTheirGradients) {
  Spec spec = self_attention(9, 4, 2);
  spec.length_k = 5;  // causal, bottom-right: the first four queries see nothing
  spec.ridge = RidgeShape::token;
  for (const DType dtype : kAllTypes) {
    spec = with(spec, dtype);
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 1);
    const Forward got = forward(spec, inputs);
    const Backward gradients = backward(spec, inputs);
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 9; ++i) {
        const size_t row = static_cast<size_t>(h * 9 + i);
        const bool empty = i < 4;
        EXPECT_EQ(all_equal(row_of(spec, Side::queries, 4, got.o, 0, i, h), 0), empty) << i;
        EXPECT_EQ(all_equal(row_of(spec, Side::queries, 4, gradients.dq, 0, i, h), 0), i <= 4)
            << i;  // one key: no gradient in q either
        EXPECT_EQ(gradients.dridge[static_cast<size_t>(i * 2 + h)] == 0, i <= 4) << i;
        EXPECT_EQ(got.saved[static_cast<size_t>(got.sizes.saved_omega) + row] == 0, empty) << "omega";
        EXPECT_EQ(got.info.status[row], LLA_ROW_OK);
      }
    }
  }
}

TEST_P(Semantics, RowsWithoutKeysAreZeroWhateverTheyHold) {
  Spec spec = self_attention(6, 4);
  spec.length_k = 3;
  spec.ridge = RidgeShape::token;
  if (!takes(spec)) GTEST_SKIP() << lla_last_error();
  Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 1);
  inputs.q[0] = kNan;
  inputs.ridge[1] = kNan;
  inputs.ridge[2] = -1;
  const Forward got = forward(spec, inputs);
  EXPECT_TRUE(all_equal({got.o.begin(), got.o.begin() + 12}, 0));
  EXPECT_TRUE(all_finite(got.o));
  const Backward gradients = backward(spec, inputs);
  EXPECT_TRUE(all_equal({gradients.dq.begin(), gradients.dq.begin() + 12}, 0));
  EXPECT_TRUE(all_finite(gradients.dk));
}

TEST_P(Semantics, RowsWithoutKeysAreOkWhateverTheRidge) {
  for (const DType dtype : kAllTypes) {
    for (const int solver : kAllSolvers) {
      Spec spec = with(self_attention(6, 4), dtype, solver);
      spec.length_k = 3;
      if (!takes(spec)) continue;
      for (const double ridge : {0.0, 0x1p-149, 1e-40, 0x1p-126, 1e38}) {  // 1 / 1e-40 is beyond float
        const Forward got = forward(spec, make_inputs(spec, data::Kind::randn, ridge, 1));
        for (size_t i = 0; i < 3; ++i) EXPECT_EQ(got.info.status[i], LLA_ROW_OK) << spec.text() << ", ridge " << ridge;
        EXPECT_TRUE(all_equal({got.o.begin(), got.o.begin() + 12}, 0)) << spec.text() << ", ridge " << ridge;
        EXPECT_TRUE(all_finite(got.o)) << spec.text() << ", ridge " << ridge;
      }
    }
  }
}

// Nothing is promised of rows whose logits overflow, but that they come to an end and keep to themselves.
TEST_P(Semantics, RowsWithoutKeysAreZeroBesideLogitsThatOverflow) {
  Spec spec = self_attention(6, 8);
  spec.length_k = 3;
  spec.ridge = RidgeShape::token;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    spec.dtype = dtype;
    if (!takes(spec)) continue;
    Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 1);
    for (double& q : inputs.q) q *= 0x1p70;
    for (double& k : inputs.k) k *= 0x1p70;
    const Forward got = forward(spec, inputs);
    EXPECT_TRUE(all_equal({got.o.begin(), got.o.begin() + 24}, 0));
  }
}

TEST_P(Semantics, OneKeyGivesItsValueExactly) {
  for (const DType dtype : kAllTypes) {
    for (const int solver : kAllSolvers) {
      for (const double ridge : {0.0, 1e-30, 0.01, 1.0, kInf}) {
        Spec spec = with(self_attention(40, 8), dtype, solver);
        spec.options.window_left = 0;  // each query sees its own key only
        if (!takes(spec)) continue;
        const Inputs inputs = make_inputs(spec, data::Kind::randn, ridge, 2);
        EXPECT_TRUE(identical(forward(spec, inputs).o, inputs.v)) << spec.text() << ", ridge " << ridge;
      }
    }
  }
}

TEST_P(Semantics, TheFirstRowOfACausalHeadIsItsValueExactly) {
  for (const DType dtype : kAllTypes) {
    Spec spec = with(self_attention(130, 64), dtype);
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::self, 0.1, 3);
    EXPECT_EQ(row_of(spec, Side::queries, 64, forward(spec, inputs).o, 0, 0, 0),
              row_of(spec, Side::keys, 64, inputs.v, 0, 0, 0));
  }
}

TEST_P(Semantics, ZeroSizesAreLegal) {
  struct Sizes {
    int64_t batch, length_q, length_k, heads;
  };
  for (const Sizes s :
       {Sizes{0, 5, 5, 2}, Sizes{2, 0, 5, 2}, Sizes{2, 5, 0, 2}, Sizes{1, 0, 0, 1}, Sizes{2, 3, 4, 0}}) {
    for (const RidgeShape ridge :
         {RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension, RidgeShape::none}) {
      Spec spec = self_attention(s.length_q, 4, s.heads, s.batch);
      spec.length_k = s.length_k;
      spec.ridge = ridge;
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 4);
      EXPECT_TRUE(all_equal(forward(spec, inputs).o, 0)) << spec.text();
      const Backward gradients = backward(spec, inputs);
      for (const auto* t : {&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dridge, &gradients.dx}) {
        EXPECT_TRUE(all_equal(*t, 0)) << spec.text();
      }
    }
  }
}

TEST_P(Semantics, EmptySequencesOfAPackedBatchAreLegal) {
  Spec spec = self_attention(7, 4, 2);
  spec.ridge = RidgeShape::token;
  spec.cu_q = {0, 0, 3, 3, 7, 7};
  spec.cu_k = {0, 2, 5, 5, 5, 7};  // keys without queries, queries without keys, neither
  if (!takes(spec)) GTEST_SKIP() << lla_last_error();
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 5);
  const Forward got = forward(spec, inputs);
  const Backward gradients = backward(spec, inputs);
  EXPECT_TRUE(all_equal({got.o.begin() + 3 * 8, got.o.end()}, 0));
  EXPECT_FALSE(all_equal({got.o.begin(), got.o.begin() + 3 * 8}, 0));
  for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{5, 7}}) {
    EXPECT_TRUE(all_equal({gradients.dk.begin() + begin * 8, gradients.dk.begin() + end * 8}, 0));
    EXPECT_TRUE(all_equal({gradients.dv.begin() + begin * 8, gradients.dv.begin() + end * 8}, 0));
  }
}

// ---- the ridge's extremes ------------------------------------------------------------------------------------------

// Plain softmax attention, one head, nothing shared with the code under test.
std::vector<double> softmax_attention(const Spec& spec, const Inputs& in) {
  const int64_t dim = spec.dim, width = spec.value_dim;
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  std::vector<double> o(static_cast<size_t>(spec.length_q * width), 0.0);
  for (int64_t i = 0; i < spec.length_q; ++i) {
    std::vector<double> logits;
    double largest = -kInf, sum = 0;
    for (int64_t j = 0; j <= i + spec.length_k - spec.length_q; ++j) {
      double logit = 0;
      for (int64_t d = 0; d < dim; ++d)
        logit += in.q[static_cast<size_t>(i * dim + d)] * in.k[static_cast<size_t>(j * dim + d)];
      logits.push_back(scale * logit);
      largest = std::max(largest, logits.back());
    }
    for (double& logit : logits) sum += logit = std::exp(logit - largest);
    for (size_t j = 0; j < logits.size(); ++j) {
      for (int64_t c = 0; c < width; ++c) {
        o[static_cast<size_t>(i * width + c)] +=
            logits[j] / sum * in.v[j * static_cast<size_t>(width) + static_cast<size_t>(c)];
      }
    }
  }
  return o;
}

TEST_P(Semantics, AnInfiniteOrHugeRidgeIsSoftmax) {
  for (const DType dtype : kAllTypes) {
    for (const int solver : kAllSolvers) {
      for (const double ridge : {kInf, 1e30}) {
        Spec spec = with(self_attention(70, 16), dtype, solver);
        spec.length_k = 90;
        if (!takes(spec)) continue;
        const Inputs inputs = make_inputs(spec, data::Kind::self, ridge, 6);
        const Forward got = forward(spec, inputs);
        expect_output(spec, got.o, softmax_attention(spec, inputs),
                      dtype == DType::f64   ? 1e-13
                      : dtype == DType::f32 ? 2e-6
                                            : 4e-3);
        for (int status : got.info.status) EXPECT_EQ(status, LLA_ROW_OK);
        const Backward gradients = backward(spec, inputs);
        EXPECT_TRUE(all_finite(gradients.dq) && all_finite(gradients.dk) && all_finite(gradients.dv));
        EXPECT_NEAR(gradients.dridge[0], 0, ridge == kInf ? 0 : 1e-30);
      }
    }
  }
}

TEST_P(Semantics, AnInfiniteRidgeInSomeDimensionsRemovesThoseFromX) {
  for (const int solver : kAllSolvers) {
    for (const DType dtype : {DType::f64, DType::f32}) {
      Spec spec = with(self_attention(70, 8), dtype, solver);
      spec.ridge = RidgeShape::dimension;
      if (!takes(spec)) continue;
      Inputs inputs = make_inputs(spec, data::Kind::randn, 0.3, 7);
      for (size_t i = 0; i < inputs.ridge.size(); i += 3) inputs.ridge[i] = kInf;
      expect_output(spec, forward(spec, inputs).o, oracle_forward(spec, inputs).o, accuracy_gates(dtype, 0.1).output);
      const Backward gradients = backward(spec, inputs);
      expect_gradients(spec, gradients, oracle_backward(spec, inputs), accuracy_gates(dtype, 0.1).gradient);
      for (size_t i = 0; i < inputs.ridge.size(); i += 3) EXPECT_EQ(gradients.dridge[i], 0);
    }
  }
}

// The linear end: without a scale all weights are equal, and every query asks the same affine ridge regression,
//   minimise over b, W   sum |v_j - b - W k_j|^2 + n ridge |W|^2,
// solved here by its own normal equations.
TEST_P(Semantics, WithoutAScaleItIsTheGlobalAffineRidgeFit) {
  for (const DType dtype : kAllTypes) {
    for (const int solver : kAllSolvers) {
      for (const double ridge : {0x1p-10, 0.125, 2.0}) {  // exact in f32
        const int64_t dim = 6, n = 90, unknowns = dim + 1;
        Spec spec = with(self_attention(n, dim), dtype, solver);
        spec.options.causal = 0;
        spec.options.scale = 0;
        if (!takes(spec)) continue;
        const Inputs inputs = make_inputs(spec, data::Kind::mean, ridge, 15);
        const auto at = [&](const std::vector<double>& t, int64_t i, int64_t c) {
          return c < 0 ? 1.0 : t[static_cast<size_t>(i * dim + c)];  // -1: the intercept's column
        };
        std::vector<std::vector<double>> a(unknowns, std::vector<double>(2 * dim + 1, 0.0));  // right-hand sides behind
        for (int64_t r = 0; r < unknowns; ++r) {
          for (int64_t j = 0; j < n; ++j) {
            for (int64_t c = 0; c < unknowns; ++c) a[r][c] += at(inputs.k, j, r - 1) * at(inputs.k, j, c - 1);
            for (int64_t c = 0; c < dim; ++c) a[r][unknowns + c] += at(inputs.k, j, r - 1) * at(inputs.v, j, c);
          }
          if (r > 0) a[r][r] += static_cast<double>(n) * ridge;
        }
        for (int64_t p = 0; p < unknowns; ++p) {  // Gauss and Jordan; positive definite, so without pivoting
          for (int64_t r = 0; r < unknowns; ++r) {
            const double f = a[r][p] / a[p][p];
            for (int64_t c = p; r != p && c < 2 * dim + 1; ++c) a[r][c] -= f * a[p][c];
          }
        }
        std::vector<double> want;
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t c = 0; c < dim; ++c) {
            double sum = 0;
            for (int64_t r = 0; r < unknowns; ++r) sum += at(inputs.q, i, r - 1) * a[r][unknowns + c] / a[r][r];
            want.push_back(sum);
          }
        }
        // The queries lie far outside the keys here, which have a large mean: a fit that lost it would show.
        EXPECT_LE(relative_error(forward(spec, inputs).o, want), dtype == DType::f64   ? 1e-11
                                                                 : dtype == DType::f32 ? 1e-4
                                                                                       : 1e-2)
            << spec.text() << ", ridge " << ridge;
      }
    }
  }
}

// v = M k + c: once D + 1 keys in general position are visible, the estimate at q is M q + c, whatever the weights.
TEST_P(Semantics, LinearDataIsRecoveredOnceTheKeysSpanTheSpace) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const int solver : kAllSolvers) {
      const int64_t dim = 5, length = 60;
      Spec spec = with(self_attention(length, dim), dtype, solver);
      if (!takes(spec)) continue;
      Inputs inputs = make_inputs(spec, data::Kind::randn, 0.0, 8);
      inputs.ridge = {0.0};
      const auto line = [&](const std::vector<double>& at, int64_t row, int64_t c) {
        double sum = 0.5 - static_cast<double>(c);
        for (int64_t d = 0; d < dim; ++d)
          sum += data::normal(8, 99, static_cast<uint64_t>(c * dim + d)) * at[static_cast<size_t>(row * dim + d)];
        return sum;
      };
      std::vector<double> want;
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t c = 0; c < dim; ++c) {
          inputs.v[static_cast<size_t>(i * dim + c)] = rounded(line(inputs.k, i, c), dtype);
          want.push_back(line(inputs.q, i, c));
        }
      }
      const Forward got = forward(spec, inputs);
      EXPECT_TRUE(all_finite(got.o));
      // Exactly at D + 1 keys the system may be close to singular; single precision gets a few more keys before it is
      // held to it.
      const int64_t first = dtype == DType::f64 ? dim : 4 * dim;
      const auto from = [&](const std::vector<double>& t) {
        return std::vector<double>(t.begin() + first * dim, t.end());
      };
      EXPECT_LE(relative_error(from(got.o), from(want)), dtype == DType::f64 ? 1e-8 : 1e-3) << spec.text();
      for (int64_t i = 4 * dim; i < length; ++i) EXPECT_EQ(got.info.status[static_cast<size_t>(i)], LLA_ROW_OK) << i;
    }
  }
}

TEST_P(Semantics, RankDeficientRowsWithoutRidgeAreFiniteAndReported) {
  for (const DType dtype : kAllTypes) {
    for (const int solver : kAllSolvers) {
      for (const data::Kind kind : {data::Kind::randn, data::Kind::mean}) {
        Spec spec = with(self_attention(152, 16), dtype, solver);
        spec.options.tolerance = dtype == DType::f64 ? 1e-10 : 1e-4;
        if (!takes(spec)) continue;
        Inputs inputs = make_inputs(spec, kind, 0, 9);
        const Forward got = forward(spec, inputs);
        EXPECT_TRUE(all_finite(got.o)) << spec.text();
        EXPECT_TRUE(all_finite(got.saved)) << spec.text();
        for (size_t i = 0; i < 16; ++i) {  // at most 16 keys span at most 15 directions of 16
          EXPECT_TRUE(got.info.status[i] == LLA_ROW_BREAKDOWN || got.info.status[i] == LLA_ROW_MAX_ITERATIONS)
              << "row " << i << ", " << spec.text();
        }
        if (dtype == DType::f16) continue;  // its range may well be too small for these gradients
        const Backward gradients = backward(spec, inputs);
        for (const auto* t : {&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dridge})
          EXPECT_TRUE(all_finite(*t)) << spec.text();
      }
    }
  }
}

TEST_P(Semantics, EqualKeysWithoutRidgeAreFinite) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const int solver : kAllSolvers) {
      for (const double ridge : {0.0, 1e-38, 1e-20, 1e-8}) {
        Spec spec = with(self_attention(70, 8), dtype, solver);
        if (!takes(spec)) continue;
        Inputs inputs = make_inputs(spec, data::Kind::randn, ridge, 10);
        for (size_t i = 0; i < inputs.k.size(); ++i) inputs.k[i] = inputs.k[i % 8];
        const Forward got = forward(spec, inputs);
        EXPECT_TRUE(all_finite(got.o)) << spec.text() << ", ridge " << ridge;
        if (ridge == 0) {
          for (int status : got.info.status) EXPECT_NE(status, LLA_ROW_OK) << spec.text();
        }
        const Backward gradients = backward(spec, inputs);
        for (const auto* t : {&gradients.dq, &gradients.dk, &gradients.dv})
          EXPECT_TRUE(all_finite(*t)) << spec.text() << ", ridge " << ridge;
      }
    }
  }
}

// ---- NaN and Inf ---------------------------------------------------------------------------------------------------

// Runs with one row spoiled and clean; the spoiled row is NaN and says so, the other rows are as before.
struct Spoiler {
  const char* name;
  void (*spoil)(Inputs&, size_t row, size_t dim);
};
const Spoiler kRowSpoilers[] = {
    {"NaN in q", [](Inputs& in, size_t row, size_t dim) { in.q[row * dim + 1] = kNan; }},
    {"Inf in q", [](Inputs& in, size_t row, size_t dim) { in.q[row * dim] = kInf; }},
    {"negative ridge", [](Inputs& in, size_t row, size_t) { in.ridge[row] = -0.25; }},
    {"-Inf ridge", [](Inputs& in, size_t row, size_t) { in.ridge[row] = -kInf; }},
    {"NaN ridge", [](Inputs& in, size_t row, size_t) { in.ridge[row] = kNan; }},
};

TEST_P(Semantics, ABadRowSpoilsItselfAndTheGradientsOfTheKeysItSees) {
  for (const DType dtype : kAllTypes) {
    for (const int solver : kAllSolvers) {
      for (const Spoiler& spoiler : kRowSpoilers) {
        Spec spec = with(self_attention(140, 8), dtype, solver);
        spec.ridge = RidgeShape::token;
        if (!takes(spec)) continue;
        SCOPED_TRACE(spoiler.name);
        const Inputs clean = make_inputs(spec, data::Kind::randn, 0.5, 11);
        Inputs spoiled = clean;
        const int64_t bad = 70;
        spoiler.spoil(spoiled, static_cast<size_t>(bad), 8);
        const Forward want = forward(spec, clean);
        const Forward got = forward(spec, spoiled);
        const Backward want_gradients = backward(spec, clean);
        const Backward gradients = backward(spec, spoiled);
        const double gate = rounding_gate(dtype);
        for (int64_t i = 0; i < 140; ++i) {
          const size_t row = static_cast<size_t>(i);
          const auto o = row_of(spec, Side::queries, 8, got.o, 0, i, 0);
          const auto dq = row_of(spec, Side::queries, 8, gradients.dq, 0, i, 0);
          const auto dk = row_of(spec, Side::keys, 8, gradients.dk, 0, i, 0);
          const auto dv = row_of(spec, Side::keys, 8, gradients.dv, 0, i, 0);
          EXPECT_EQ(got.info.status[row] == LLA_ROW_NAN, i == bad) << i;
          EXPECT_EQ(gradients.info.status[row] == LLA_ROW_NAN, i == bad) << i;
          if (i == bad) {
            EXPECT_TRUE(all_nan(o) && all_nan(dq) && std::isnan(gradients.dridge[row]));
          } else {
            EXPECT_LE(relative_error(o, row_of(spec, Side::queries, 8, want.o, 0, i, 0)), 10 * gate) << i;
            EXPECT_LE(relative_error(dq, row_of(spec, Side::queries, 8, want_gradients.dq, 0, i, 0)), 100 * gate) << i;
            EXPECT_TRUE(all_finite(dq) && std::isfinite(gradients.dridge[row])) << i;
          }
          if (i <= bad) {
            EXPECT_TRUE(all_nan(dk) && all_nan(dv)) << i;
          } else {
            EXPECT_LE(relative_error(dv, row_of(spec, Side::keys, 8, want_gradients.dv, 0, i, 0)), 10 * gate) << i;
            EXPECT_TRUE(all_finite(dk)) << i;
          }
        }
      }
    }
  }
}

// Whatever its weight is: with long queries most are nothing.
TEST_P(Semantics, ABadKeyOrValueSpoilsTheRowsThatSeeItAndNoOther) {
  for (const DType dtype : kAllTypes) {
    for (const int solver : kAllSolvers) {
      for (const auto& [poison, longer] :
           {std::pair{kNan, 1.0}, {kInf, 1.0}, {-kInf, 1.0}, {kNan, 300.0}, {-kInf, 300.0}}) {
        for (const bool in_value : {false, true}) {
          Spec spec = with(self_attention(140, 8), dtype, solver);
          spec.options.window_left = 9;
          if (!takes(spec)) continue;
          SCOPED_TRACE(
              core::cat(poison, in_value ? " in a value" : " in a key", ", queries times ", longer, ", ", spec.text()));
          Inputs clean = make_inputs(spec, data::Kind::randn, 0.5, 12);
          for (double& q : clean.q) q *= longer;
          Inputs spoiled = clean;
          const int64_t bad = 65;  // seen by rows 65 to 74
          (in_value ? spoiled.v : spoiled.k)[bad * 8 + 3] = poison;
          const Forward want = forward(spec, clean);
          const Forward got = forward(spec, spoiled);
          const Backward gradients = backward(spec, spoiled);
          for (int64_t i = 0; i < 140; ++i) {
            const bool sees = i >= bad && i <= bad + 9;
            const auto o = row_of(spec, Side::queries, 8, got.o, 0, i, 0);
            const auto dq = row_of(spec, Side::queries, 8, gradients.dq, 0, i, 0);
            EXPECT_EQ(got.info.status[static_cast<size_t>(i)] == LLA_ROW_NAN, sees) << i;
            if (sees) {
              EXPECT_TRUE(all_nan(o)) << i;
              EXPECT_TRUE(all_nan(dq)) << i;
            } else {
              EXPECT_LE(relative_error(o, row_of(spec, Side::queries, 8, want.o, 0, i, 0)), 10 * rounding_gate(dtype))
                  << i;
              EXPECT_TRUE(all_finite(dq)) << i;
            }
            const bool touched = i >= bad - 9 && i <= bad + 9;  // keys that share a row with the bad one
            EXPECT_EQ(all_finite(row_of(spec, Side::keys, 8, gradients.dk, 0, i, 0)), !touched) << i;
          }
        }
      }
    }
  }
}

TEST_P(Semantics, GivenXItsNansStayInTheirRow) {
  for (const DType dtype : kAllTypes) {
    Spec spec = with(self_attention(70, 8), dtype);
    spec.ridge = RidgeShape::none;
    if (!takes(spec)) continue;
    Inputs inputs = make_inputs(spec, data::Kind::randn, 0, 13);
    const Forward want = forward(spec, inputs);
    inputs.x[8 * 8 + 2] = kNan;
    const Forward got = forward(spec, inputs);
    for (int64_t i = 0; i < 70; ++i) {
      const auto o = row_of(spec, Side::queries, 8, got.o, 0, i, 0);
      if (i == 8) {
        EXPECT_TRUE(all_nan(o));
      } else {
        EXPECT_LE(relative_error(o, row_of(spec, Side::queries, 8, want.o, 0, i, 0)), 10 * rounding_gate(dtype)) << i;
      }
    }
  }
}

// Keys that no query sees: to the left of every window, and beyond the last sequence of a packed batch.
TEST_P(Semantics, KeysNobodySeesNeverMatter) {
  for (const DType dtype : kAllTypes) {
    for (const double poison : {kNan, kInf}) {
      Spec windowed = with(self_attention(70, 8), dtype);
      windowed.length_k = 150;
      windowed.options.window_left = 9;  // the first query is at key 80 and sees 71 to 80
      Spec packed = with(self_attention(80, 8), dtype);
      packed.cu_q = {0, 33, 80};
      packed.cu_k = {0, 40, 60};
      for (const Spec& spec : {windowed, packed}) {
        if (!takes(spec)) continue;
        const Inputs clean = make_inputs(spec, data::Kind::randn, 0.5, 14);
        Inputs spoiled = clean;
        const int64_t begin = spec.packed() ? 60 : 0, end = spec.packed() ? 80 : 71;
        for (int64_t i = begin * 8; i < end * 8; ++i)
          spoiled.k[static_cast<size_t>(i)] = spoiled.v[static_cast<size_t>(i)] = poison;
        EXPECT_TRUE(identical(forward(spec, spoiled).o, forward(spec, clean).o)) << spec.text();
        const Backward want = backward(spec, clean), got = backward(spec, spoiled);
        EXPECT_TRUE(identical(got.dq, want.dq)) << spec.text();
        EXPECT_TRUE(identical(got.dk, want.dk)) << spec.text();
        EXPECT_TRUE(identical(got.dv, want.dv)) << spec.text();
        EXPECT_TRUE(identical(got.dridge, want.dridge)) << spec.text();
        if (!spec.packed()) {
          EXPECT_TRUE(all_equal({got.dk.begin(), got.dk.begin() + 71 * 8}, 0)) << spec.text();
          EXPECT_TRUE(all_equal({got.dv.begin(), got.dv.begin() + 71 * 8}, 0)) << spec.text();
        }
      }
    }
  }
}

// ---- what is reported ----------------------------------------------------------------------------------------------

TEST_P(Semantics, InfoSaysHowEachRowWasSolved) {
  Spec spec = self_attention(90, 16);
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 15);
  spec.options.solver = LLA_SOLVER_DIRECT;
  const bool direct = takes(spec);
  if (direct) {
    const RowInfo info = forward(spec, inputs).info;
    for (size_t i = 0; i < 90; ++i) {
      EXPECT_EQ(info.iterations[i], -1);
      EXPECT_EQ(info.residual[i], -1);
      EXPECT_EQ(info.status[i], LLA_ROW_OK);
    }
  }
  spec.options.solver = LLA_SOLVER_CG;
  spec.options.tolerance = 1e-4;
  if (!takes(spec)) return;
  const RowInfo info = forward(spec, inputs).info;
  const RowInfo oracle = run_forward(spec, inputs, "reference").info;
  for (size_t i = 0; i < 90; ++i) {
    EXPECT_LE(std::abs(info.iterations[i] - oracle.iterations[i]), 1) << i;
    EXPECT_LE(info.residual[i], 1e-4);
    EXPECT_GE(info.residual[i], 0);
    EXPECT_EQ(info.status[i], LLA_ROW_OK);
  }
  spec.options.max_iterations = 2;
  const RowInfo short_of = forward(spec, inputs).info;
  for (size_t i = 20; i < 90; ++i) {
    EXPECT_EQ(short_of.iterations[i], 2);
    EXPECT_GT(short_of.residual[i], 1e-4);
    EXPECT_EQ(short_of.status[i], LLA_ROW_MAX_ITERATIONS);
  }
}

TEST_P(Semantics, GivenXNothingIsSolved) {
  Spec spec = self_attention(20, 8);
  spec.ridge = RidgeShape::none;
  if (!takes(spec)) GTEST_SKIP() << lla_last_error();
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0, 16);
  for (const RowInfo& info : {forward(spec, inputs).info, backward(spec, inputs).info}) {
    for (size_t i = 0; i < 20; ++i) {
      EXPECT_EQ(info.iterations[i], -1);
      EXPECT_EQ(info.residual[i], -1);
      EXPECT_EQ(info.status[i], LLA_ROW_OK);
    }
  }
}

TEST_P(Semantics, SavedHoldsTheDocumentedSections) {
  Spec spec = self_attention(51, 8, 2);
  spec.value_dim = 5;
  spec.options.tolerance = 1e-6;
  if (!takes(spec)) GTEST_SKIP() << lla_last_error();
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 17);
  const Forward got = forward(spec, inputs);
  Spec f64 = spec;
  f64.dtype = DType::f64;
  f64.options.solver = LLA_SOLVER_DIRECT;
  const Forward want = run_forward(f64, inputs, "reference");
  ASSERT_EQ(got.saved.size(), want.saved.size());
  constexpr int64_t kRows = 102;
  const auto section = [](const Forward& of, int64_t lla_forward_sizes::*offset, int64_t width) {
    const auto first = of.saved.begin() + of.sizes.*offset;
    return std::vector<double>(first, first + kRows * width);
  };
  const auto max = section(got, &lla_forward_sizes::saved_max, 1),
             omega = section(got, &lla_forward_sizes::saved_omega, 1),
             want_max = section(want, &lla_forward_sizes::saved_max, 1),
             want_omega = section(want, &lla_forward_sizes::saved_omega, 1);
  for (size_t r = 0; r < static_cast<size_t>(kRows); ++r) {
    EXPECT_EQ(max[r], std::rint(max[r])) << "max is an integer";
    EXPECT_NEAR(omega[r] * std::exp2(max[r]) / (want_omega[r] * std::exp2(want_max[r])), 1, 1e-5) << "omega";
  }
  const auto error = [&](int64_t lla_forward_sizes::*offset, int64_t width) {
    return relative_error(section(got, offset, width), section(want, offset, width));
  };
  EXPECT_LE(error(&lla_forward_sizes::saved_mean_k, spec.dim), 1e-4);
  EXPECT_LE(error(&lla_forward_sizes::saved_mean_v, spec.value_dim), 1e-4);
  EXPECT_LE(error(&lla_forward_sizes::saved_x, spec.dim), 1e-4);
}

}  // namespace
}  // namespace lla::test
