// Data that repeats, vanishes or differs in size by orders of magnitude, and heads of a real model: nothing that fp64
// finds finite and the type can hold is NaN or infinite, and errors are within the gates or the row's status says why
// not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "core/text.hpp"
#include "support/conditioned.hpp"
#include "support/gates.hpp"
#include "support/real_cases.hpp"

namespace lla::test {
namespace {

// Rows that say they were not solved are taken out of the comparison. One head, so row i of everything is row i.
size_t forgive(const std::vector<int>& status, int64_t channels, Values& got, const Values& want) {
  size_t forgiven = 0;
  const auto width = static_cast<size_t>(channels);
  for (size_t row = 0; row < status.size(); ++row) {
    if (status[row] == LLA_ROW_OK) continue;
    ++forgiven;
    std::copy_n(want.begin() + static_cast<std::ptrdiff_t>(row * width), width,
                got.begin() + static_cast<std::ptrdiff_t>(row * width));
  }
  return forgiven;
}

// Rows the solver need not finish: logits so large or a ridge so small against the keys that fp32 has nothing to say.
bool hard(data::Kind kind, double ridge) {
  switch (kind) {
    case data::Kind::long_keys:
    case data::Kind::one_large_key: return ridge < 10;
    case data::Kind::long_queries: return ridge < 0.01;
    default: return false;
  }
}

void expect_right(const Spec& spec, const Inputs& inputs, const Truth& truth, const std::string& implementation,
                  Gates gates, bool may_give_up) {
  Forward got = run_forward(spec, inputs, implementation);
  ASSERT_EQ(got.status, LLA_OK) << got.message;
  const Checked o{"o", got.o, truth.forward.o, truth.moved.o, spec.output()};
  expect_finite(o);
  Backward gradients = run_backward(spec, inputs, got.saved, implementation);
  ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
  const Backward &want = truth.backward, &moved = truth.moved_backward;
  const Checked dq{"dq", gradients.dq, want.dq, moved.dq, spec.output()};
  const Checked dk{"dk", gradients.dk, want.dk, moved.dk, spec.output()};
  const Checked dv{"dv", gradients.dv, want.dv, moved.dv, spec.output()};
  const Checked dridge{"dridge", gradients.dridge, want.dridge, moved.dridge, spec.ridge_dtype()};
  const Checked dx{"dx", gradients.dx, want.dx, moved.dx, spec.output()};
  for (const Checked& c : {dq, dk, dv, dridge, dx}) expect_finite(c);
  if (testing::Test::HasFailure()) return;

  std::vector<int> status = got.info.status;
  for (size_t row = 0; row < status.size(); ++row) status[row] = std::max(status[row], gradients.info.status[row]);
  const size_t unsolved = forgive(status, spec.value_dim, got.o, truth.forward.o);
  expect_close(o, gates.output);
  forgive(status, spec.dim, gradients.dq, want.dq);
  expect_close(dq, gates.gradient);
  if (spec.ridge == RidgeShape::token) forgive(status, 1, gradients.dridge, want.dridge);
  if (spec.ridge == RidgeShape::dimension) forgive(status, spec.dim, gradients.dridge, want.dridge);
  if (spec.ridge == RidgeShape::token || spec.ridge == RidgeShape::dimension) expect_close(dridge, gates.gradient);
  if (unsolved == 0) {
    for (const Checked& c : {dk, dv, dx}) expect_close(c, gates.gradient);
    if (spec.ridge == RidgeShape::scalar || spec.ridge == RidgeShape::head) {
      const double summands_moved = distance(moved.dridge_terms, want.dridge_terms);
      EXPECT_LE(distance(dridge.got, dridge.want),
                gates.gradient * want.dridge_summands + data::kForgivenMoves * summands_moved + 0x1p-149)
          << "dridge";
    }
  }
  if (!may_give_up) {
    EXPECT_EQ(unsolved, 0u) << "rows that report no solution";
  }
}

// ---- the kinds
// -------------------------------------------------------------------------------------------------------

struct DegenerateCase {
  Spec spec;
  double ridge;
  int power;  // gradients times 2^power
};

// Every type, f32 also as TF32, with every size of the ridge; in turn the shapes of the ridge, the sizes of the
// gradient, the dimension.
std::vector<DegenerateCase> cases() {
  std::vector<DegenerateCase> list;
  constexpr RidgeShape ridges[] = {RidgeShape::token, RidgeShape::none, RidgeShape::scalar, RidgeShape::dimension,
                                   RidgeShape::head};
  constexpr int powers[] = {0, -100, -47, 13, -80};
  constexpr int narrow_powers[] = {0, -8, -4, 10, -2};
  size_t turn = 0;
  const auto add = [&](DType dtype, bool tf32) {
    for (const double ridge : {1.0, 0.001, 0.1, 1e4, 30.0}) {
      Spec spec = self_attention(turn % 3 == 1 ? 96 : 70, turn % 4 == 2 && !reduced() ? 128 : 64);
      spec.dtype = dtype;
      spec.ridge = ridges[turn % std::size(ridges)];
      spec.options.tolerance = tight_tolerance(dtype);
      spec.options.max_iterations = static_cast<int32_t>(6 * spec.dim);
      if (tf32) spec.options.precision = LLA_PRECISION_TF32;
      const auto& some = dtype == DType::f16 ? narrow_powers : powers;
      const int power = some[(turn + turn / 5) % 5];
      if (dtype == DType::f16 && power < 0) spec.out_dtype = DType::f32;  // f16 holds little of such gradients
      list.push_back({spec, ridge, power});
      ++turn;
    }
  };
  for (const DType dtype : {DType::bf16, DType::f32, DType::f16, DType::f64}) add(dtype, false);
  add(DType::f32, true);
  return list;
}

Spec in_full(Spec spec) {
  spec.options.precision = LLA_PRECISION_FULL;
  return spec;
}

const Truth& truth_of(data::Kind kind, size_t number, const Spec& spec, const Inputs& inputs) {
  static std::map<std::pair<data::Kind, size_t>, Truth> known;  // the implementations share it
  return known.try_emplace({kind, number}, spec, inputs).first->second;
}

class Degenerate : public testing::TestWithParam<std::tuple<std::string, data::Kind>> {};
INSTANTIATE_TEST_SUITE_P(Implementations, Degenerate,
                         testing::Combine(testing::ValuesIn(implementations_under_test()),
                                          testing::ValuesIn(data::degenerate_kinds)),
                         [](const auto& info) {
                           return test_name(std::get<0>(info.param)) + "_" + data::name(std::get<1>(info.param));
                         });

TEST_P(Degenerate, IsFiniteAndRight) {
  const auto& [implementation, kind] = GetParam();
  if (implementation == "reference") GTEST_SKIP() << "it is the oracle";
  const std::vector<DegenerateCase> list = cases();
  for (size_t i = 0; i < list.size(); ++i) {
    const auto& [spec, ridge, power] = list[i];
    if (!takes(implementation, spec)) continue;
    const bool tf32 = spec.options.precision == LLA_PRECISION_TF32;
    if (tf32 && takes(implementation, in_full(spec))) continue;  // it makes no use of the permission
    if (reduced() && i % 4 != 0) continue;
    SCOPED_TRACE(core::cat(tf32 ? "TF32, ridge " : "ridge ", ridge, ", gradients times 2^", power, ", ", spec.text()));
    Inputs inputs = make_inputs(spec, kind, ridge, i + 1);
    for (size_t e = 0; e < inputs.grad_o.size(); ++e) {
      const size_t row = e / static_cast<size_t>(spec.value_dim);
      inputs.grad_o[e] = row % 6 == 4 ? 0 : rounded(std::ldexp(inputs.grad_o[e], power), spec.dtype);
    }
    // Unstudied data, so five times the gates, as in the fuzzer. They are for a ridge of at least 0.01 against keys of
    // variance 1; below that a solution has as many digits less.
    const bool large_keys = kind == data::Kind::long_keys || kind == data::Kind::one_large_key;
    const double relative_ridge = large_keys ? 1e-4 * ridge : ridge;
    const Gates known = accuracy_gates(tf32 ? DType::f16 : spec.dtype, relative_ridge);
    const double slack = relative_ridge < 1e-3 ? 20 : 5;
    const Gates gates{slack * known.output, slack * known.gradient};
    expect_right(spec, inputs, truth_of(kind, i, spec, inputs), implementation, gates,
                 hard(kind, ridge) || spec.ridge == RidgeShape::none);
    if (HasFailure()) return;
  }
}

// ---- heads of a real model
// -------------------------------------------------------------------------------------------

// Local linear attention extrapolates: where values follow the keys, outputs follow the queries, and may be larger than
// every value, and than their type can hold. They are infinite then, with a sign, and the row does not say OK; others do.
class BeyondTheType : public testing::TestWithParam<std::string> {
 protected:
  static void expect_said(const Spec& spec, Inputs inputs) {
    for (size_t i = 0; i < inputs.v.size(); ++i) inputs.v[i] = rounded(inputs.k[i] * 12000, spec.dtype);
    for (double& q : inputs.q) q = rounded(q * 2, spec.dtype);
    for (double& x : inputs.x) x = rounded(x * 4, spec.given_dtype());
    const Forward got = run_forward(spec, inputs, GetParam()), want = oracle_forward(spec, inputs);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    size_t beyond = 0, held = 0;
    const auto width = static_cast<size_t>(spec.value_dim);
    for (size_t row = 0; row < got.info.status.size(); ++row) {
      bool infinite = false, large = false;
      for (size_t i = row * width; i < (row + 1) * width; ++i) {
        infinite |= std::isinf(got.o[i]);
        large |= std::abs(want.o[i]) > 60000;
        if (std::isinf(got.o[i])) {
          EXPECT_GT(got.o[i] * want.o[i], 60000) << "row " << row;
        }
        if (std::abs(want.o[i]) > 70000) {
          EXPECT_TRUE(std::isinf(got.o[i])) << "row " << row;
        }
      }
      beyond += infinite, held += !large;
      if (infinite) {
        EXPECT_NE(got.info.status[row], LLA_ROW_OK) << "row " << row;
      }
      if (!large) {
        EXPECT_EQ(got.info.status[row], LLA_ROW_OK) << "row " << row;
      }
    }
    EXPECT_GT(beyond, 0u) << "the case tests nothing";
    EXPECT_GT(held, 0u);
  }
};
INSTANTIATE_TEST_SUITE_P(Implementations, BeyondTheType, testing::ValuesIn(implementations_under_test()),
                         [](const auto& info) { return test_name(info.param); });

TEST_P(BeyondTheType, SolvedAndGiven) {
  Spec spec = self_attention(400, 64);
  spec.dtype = DType::f16;
  expect_said(spec, make_inputs(spec, data::Kind::randn, 0.01, 5));
  spec.ridge = RidgeShape::none;
  expect_said(spec, make_inputs(spec, data::Kind::randn, 0.01, 6));
}

class RealHead : public testing::TestWithParam<std::tuple<std::string, int>> {};

const std::vector<RealCase>& heads() {
  static const std::vector<RealCase> list = real_cases();
  return list;
}

INSTANTIATE_TEST_SUITE_P(Implementations, RealHead,
                         testing::Combine(testing::ValuesIn(implementations_under_test()), testing::Range(0, 5)),
                         [](const auto& info) {
                           return test_name(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param));
                         });

// Everything as in the training run they are from: default tolerance, gradients of 1e-7 in bf16.
TEST_P(RealHead, IsRight) {
  const std::string& implementation = std::get<0>(GetParam());
  if (implementation == "reference") GTEST_SKIP() << "it is the oracle";
  ASSERT_EQ(heads().size(), 5u);
  const auto& [name, spec, inputs] = heads()[static_cast<size_t>(std::get<1>(GetParam()))];
  if (reduced() && spec.length_q > 100) GTEST_SKIP() << "too long for a sanitizer";
  if (!takes(implementation, spec)) GTEST_SKIP() << lla_last_error();
  SCOPED_TRACE(name + ", " + spec.text());
  static std::map<std::string, Truth> known;
  const Truth& truth = known.try_emplace(name, spec, inputs).first->second;
  expect_right(spec, inputs, truth, implementation, {4e-3, 2e-2}, false);
}

}  // namespace
}  // namespace lla::test
