#include "solver/row.hpp"

#include <cmath>

#include <gtest/gtest.h>

#include "data/data.hpp"
#include "reference/reference.hpp"

namespace lla::experiments {
namespace {

std::vector<float> to_floats(const std::vector<double>& x) { return {x.begin(), x.end()}; }

struct Problem {
  std::vector<float> q;
  Keys keys;
  explicit Problem(data::Kind kind, int64_t n, int64_t d, const data::Tensors& t)
      : q(to_floats(t.q)), keys(n, d, to_floats(t.k), to_floats(t.v)) {
    (void)kind;
  }
};

Problem make(data::Kind kind, int64_t n, int64_t d) {
  return Problem(kind, n, d, data::make(kind, 4, {1, n, n, 1, 1, d, d}));
}

std::vector<double> exact(const Problem& p, int64_t visible, double ridge) {
  const int64_t d = p.keys.d;
  reference::Head head;
  head.length_q = 1, head.length_k = visible;
  head.dim = head.value_dim = d;
  head.q.assign(p.q.begin() + (visible - 1) * d, p.q.begin() + visible * d);
  head.k.assign(p.keys.k.begin(), p.keys.k.begin() + visible * d);
  head.v.assign(p.keys.v.begin(), p.keys.v.begin() + visible * d);
  head.ridge.assign(d, ridge);
  head.scale = 1 / std::sqrt(double(d));
  return reference::forward(head, {}).o;
}

double error(const Problem& p, int64_t visible, const RowOptions& options) {
  const std::vector<double> truth = exact(p, visible, options.ridge);
  const RowResult r = solve_row(p.keys, visible, p.q.data() + (visible - 1) * p.keys.d, options);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < truth.size(); ++i) difference += std::pow(r.o[i] - truth[i], 2), norm += truth[i] * truth[i];
  return std::sqrt(difference / norm);
}

RowOptions options(Form form, Arithmetic arithmetic, double ridge, double tolerance) {
  return {.form = form,
          .arithmetic = arithmetic,
          .scale = 0.25,
          .ridge = ridge,
          .tolerance = tolerance,
          .max_iterations = 200};
}

TEST(SolverRow, BothFormsAreTheSameEstimator) {
  for (const data::Kind kind : data::kinds) {
    const Problem p = make(kind, 96, 16);
    for (const int64_t visible : {1, 2, 24, 96}) {
      for (const Form form : {Form::centered, Form::z}) {
        EXPECT_LT(error(p, visible, options(form, Arithmetic::f64, 0.1, 1e-13)), 1e-7)
            << data::name(kind) << " " << visible << " " << kFormNames[int(form)];
      }
    }
  }
}

TEST(SolverRow, CoarserOperandsCostAccuracyInOrder) {
  const Problem p = make(data::Kind::randn, 256, 16);
  const double f32 = error(p, 256, options(Form::centered, Arithmetic::f32, 0.1, 1e-6));
  const double f16 = error(p, 256, options(Form::centered, Arithmetic::f16, 0.1, 1e-6));
  const double bf16 = error(p, 256, options(Form::centered, Arithmetic::bf16, 0.1, 1e-6));
  EXPECT_LT(f32, 1e-5);
  EXPECT_LT(f32, f16);
  EXPECT_LT(f16, bf16);
  EXPECT_LT(bf16, 5e-2);
}

TEST(SolverRow, TheZFormLosesAccuracyAtSmallRidges) {
  const Problem p = make(data::Kind::self, 256, 16);
  EXPECT_GT(error(p, 256, options(Form::z, Arithmetic::f32, 0.01, 1e-3)),
            10 * error(p, 256, options(Form::centered, Arithmetic::f32, 0.01, 1e-3)));
}

TEST(AsOperand, RoundsToTheType) {
  EXPECT_EQ(as_operand(Arithmetic::f64, 0.1, 1), 0.1);
  EXPECT_EQ(as_operand(Arithmetic::f32, 0.1, 1), double(0.1f));
  EXPECT_NEAR(as_operand(Arithmetic::f16, 0.1, 1), 0.1, 0.1 * 0x1p-11);
  EXPECT_NE(as_operand(Arithmetic::f16, 0.1, 1), double(0.1f));
  EXPECT_NEAR(as_operand(Arithmetic::bf16, 0.1, 1), 0.1, 0.1 * 0x1p-8);
  EXPECT_GT(std::abs(as_operand(Arithmetic::bf16, 0.1, 1) - 0.1), 0.1 * 0x1p-12);
  // Far outside fp16's own range, but not outside what its scale makes of it.
  EXPECT_NEAR(as_operand(Arithmetic::f16, 1e20, 3e20), 1e20, 1e20 * 0x1p-11);
  EXPECT_NEAR(as_operand(Arithmetic::f16, -1e-20, 1e-19), -1e-20, 1e-20 * 0x1p-11);
  EXPECT_EQ(as_operand(Arithmetic::f16, 0, 0), 0);
}

}  // namespace
}  // namespace lla::experiments
