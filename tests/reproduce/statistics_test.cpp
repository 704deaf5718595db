#include "common/statistics.hpp"

#include <cmath>

#include <gtest/gtest.h>

#include "common/random.hpp"
#include "rates/estimators.hpp"
#include "rates/run.hpp"

namespace lla::experiments {
namespace {

// y = 3 x^-0.6 (1 + 2 h) with scatter, h = x^-0.25.
std::vector<Measured> power_law(double scatter) {
  std::vector<Measured> points;
  for (int i = 0; i < 9; ++i) {
    const double x = std::pow(10.0, 4 + i / 4.0), h = std::pow(x, -0.25);
    float noise[32];
    Stream(9, i, 0).normal(noise, 32);
    Measured m{x, {}, h};
    for (const float e : noise) m.y.push_back(3 * std::pow(x, -0.6) * std::exp(2 * h + scatter * e));
    points.push_back(m);
  }
  return points;
}

TEST(FitExponent, FindsTheExponentWhenTheCorrectionIsKnown) {
  const Slope exact = fit_exponent(power_law(0), true);
  EXPECT_NEAR(exact.value, -0.6, 1e-10);
  EXPECT_NEAR(exact.high - exact.low, 0, 1e-10);
  EXPECT_LT(fit_exponent(power_law(0), false).value, -0.62);  // a plain line takes the correction for slope
}

TEST(FitExponent, IntervalHoldsTheTruthAndGrowsWithScatter) {
  const Slope little = fit_exponent(power_law(0.05), true), much = fit_exponent(power_law(0.2), true);
  EXPECT_LT(little.low, -0.6);
  EXPECT_GT(little.high, -0.6);
  EXPECT_NEAR((much.high - much.low) / (little.high - little.low), 4, 0.8);
  const Slope jointly = fit_exponent(power_law(0.05), true, 8);
  EXPECT_NEAR((jointly.high - jointly.low) / (little.high - little.low), 2.7344 / 1.9600, 1e-4);
}

// The interval covers the truth as often as it says, over many independent data sets.
TEST(FitExponent, IntervalCoversAsPromised) {
  int covered = 0;
  const int trials = 2000;
  for (int t = 0; t < trials; ++t) {
    std::vector<Measured> points;
    for (int i = 0; i < 5; ++i) {
      float noise[24];
      Stream(77, t, i).normal(noise, 24);
      Measured m{std::pow(10.0, i), {}};
      for (const float e : noise) m.y.push_back(std::pow(m.x, -0.5) * (1 + 0.2 * e));
      points.push_back(m);
    }
    const Slope s = fit_exponent(points, false);
    covered += s.low <= -0.5 && -0.5 <= s.high;
  }
  EXPECT_NEAR(double(covered) / trials, 0.95, 0.02);
}

TEST(Rates, EstimatorsAreExactOnWhatTheyModel) {
  // Without noise the local linear fit of a quadratic has only its curvature bias, and the global fit of a line none.
  const Sample sample(Stream(3, 0, 0), 2, 20000, 0);
  const Point centre{0.1, -0.2};
  const double h = 0.2;
  EXPECT_NEAR(sample.local(centre, h, h).local_linear, target(2, centre) + 2 * h * h / 3, 0.15 * 2 * h * h / 3);
  // A point just inside the boundary: the local constant is off by about the slope times h, the local linear is not.
  const Point edge{0.99, 0};
  const double constant = std::abs(sample.local(edge, h, h).local_constant - target(2, edge));
  const double linear = std::abs(sample.local(edge, h, h).local_linear - target(2, edge));
  EXPECT_GT(constant, 0.3);
  EXPECT_LT(linear, 0.05 * constant);
}

TEST(Rates, PointsFillTheBall) {
  for (int d = 1; d <= 4; ++d) {
    double inside = 0, mean = 0;
    const int n = 20000;
    for (int i = 0; i < n; ++i) {
      const Point x = ball_point(Stream(1, 1, d), d, i);
      double squares = 0;
      for (int j = 0; j < d; ++j) squares += x[j] * x[j];
      ASSERT_LE(squares, 1 + 1e-12);
      inside += squares < 0.25;
      mean += x[0];
    }
    EXPECT_NEAR(inside / n, std::pow(0.5, d), 0.015);
    EXPECT_NEAR(mean / n, 0, 0.02);
  }
}

}  // namespace
}  // namespace lla::experiments
