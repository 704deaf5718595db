// Each recurrent model against a plain fp64 loop that starts from its definition at every position.
#include "regression/models.hpp"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "regression/data.hpp"

namespace lla::experiments {
namespace {

struct Case {
  RegressionSetting setting;
  std::vector<float> k, v;

  Case(int length, int d, int segment, uint64_t seed) {
    setting = {.length = length, .d = d, .segment = segment, .sequences = 1, .seed = seed};
    k.resize(size_t(length) * d);
    v.resize(k.size());
    PiecewiseLinear(setting).generate(0, k.data(), v.data());
  }
  double key(int i, int j) const { return k[size_t(i) * setting.d + j]; }
  double value(int i, int j) const { return v[size_t(i) * setting.d + j]; }
  double dot(int i, int j) const {
    double sum = 0;
    for (int c = 0; c < setting.d; ++c) sum += key(i, c) * key(j, c);
    return sum;
  }
};

using Matrix = std::vector<std::vector<double>>;

// Gaussian elimination with pivoting.
std::vector<double> solve(Matrix a, std::vector<double> b) {
  const int n = static_cast<int>(b.size());
  for (int c = 0; c < n; ++c) {
    int best = c;
    for (int r = c + 1; r < n; ++r) {
      if (std::abs(a[r][c]) > std::abs(a[best][c])) best = r;
    }
    std::swap(a[c], a[best]), std::swap(b[c], b[best]);
    for (int r = c + 1; r < n; ++r) {
      const double f = a[r][c] / a[c][c];
      for (int t = c; t < n; ++t) a[r][t] -= f * a[c][t];
      b[r] -= f * b[c];
    }
  }
  for (int r = n - 1; r >= 0; --r) {
    for (int t = r + 1; t < n; ++t) b[r] -= a[r][t] * b[t];
    b[r] /= a[r][r];
  }
  return b;
}

double plain_mesanet(const Case& c, double ridge, int i, bool strict) {
  const int d = c.setting.d, last = strict ? i - 1 : i;
  Matrix h(d, std::vector<double>(d, 0));
  std::vector<double> q(d);
  for (int a = 0; a < d; ++a) {
    h[a][a] = ridge;
    q[a] = c.key(i, a);
  }
  for (int j = 0; j <= last; ++j) {
    for (int a = 0; a < d; ++a) {
      for (int b = 0; b < d; ++b) h[a][b] += c.key(j, a) * c.key(j, b);
    }
  }
  const std::vector<double> x = solve(h, q);
  double error = 0;
  for (int out = 0; out < d; ++out) {
    double o = 0;
    for (int j = 0; j <= last; ++j) {
      double kx = 0;
      for (int a = 0; a < d; ++a) kx += c.key(j, a) * x[a];
      o += c.value(j, out) * kx;
    }
    error += std::pow(o - c.value(i, out), 2);
  }
  return error;
}

double plain_linear(const Case& c, int i, bool strict) {
  double error = 0;
  for (int out = 0; out < c.setting.d; ++out) {
    double o = 0;
    for (int j = 0; j <= (strict ? i - 1 : i); ++j) o += c.value(j, out) * c.dot(i, j);
    error += std::pow(o - c.value(i, out), 2);
  }
  return error;
}

// Lengths that are and are not multiples of the block, dimensions below and above a SIMD vector.
const std::vector<std::array<int, 3>> kShapes = {{32, 4, 8}, {96, 8, 24}, {80, 24, 80}, {64, 6, 64}};

TEST(MesaNet, AgainstPlainLoop) {
  for (const auto& [length, d, segment] : kShapes) {
    for (const double ridge : {1.0, 1e-3}) {
      const Case c(length, d, segment, 11);
      std::vector<double> inclusive(length), strict(length);
      mesanet_errors(length, d, ridge, c.k.data(), c.v.data(), {inclusive.data(), strict.data()});
      for (int i = 0; i < length; ++i) {
        const double a = plain_mesanet(c, ridge, i, false), b = plain_mesanet(c, ridge, i, true);
        ASSERT_NEAR(inclusive[i], a, 1e-8 * (a + ridge)) << "position " << i << " d " << d << " ridge " << ridge;
        ASSERT_NEAR(strict[i], b, 1e-8 * b) << "position " << i << " d " << d << " ridge " << ridge;
      }
    }
  }
}

// Over a whole sequence of the paper's length the recursion stays exact: its last position against a solve from
// scratch.
TEST(MesaNet, StaysExactOverALongSequence) {
  const Case c(1024, 32, 128, 5);
  std::vector<double> inclusive(1024), strict(1024);
  mesanet_errors(1024, 32, 1.0, c.k.data(), c.v.data(), {inclusive.data(), strict.data()});
  for (int i : {500, 1023}) {
    EXPECT_NEAR(inclusive[i], plain_mesanet(c, 1.0, i, false), 1e-9 * inclusive[i]);
    EXPECT_NEAR(strict[i], plain_mesanet(c, 1.0, i, true), 1e-9 * strict[i]);
  }
}

TEST(LinearAttention, AgainstPlainLoop) {
  for (const auto& [length, d, segment] : kShapes) {
    const Case c(length, d, segment, 12);
    std::vector<double> inclusive(length), strict(length);
    linear_errors(length, d, c.k.data(), c.v.data(), {inclusive.data(), strict.data()});
    for (int i = 0; i < length; ++i) {
      const double a = plain_linear(c, i, false), b = plain_linear(c, i, true);
      ASSERT_NEAR(inclusive[i], a, 1e-4 * a) << "position " << i << " d " << d;
      ASSERT_NEAR(strict[i], b, 1e-4 * b) << "position " << i << " d " << d;
    }
  }
}

// The guess is |k| times a standard normal vector: its expected error is known.
TEST(RandomPredictor, HasTheErrorOfAnIndependentMap) {
  const Case c(1024, 16, 1024, 3);
  std::vector<double> inclusive(1024), strict(1024);
  random_errors(1024, 16, stream(c.setting, 0, Draw::predictor), c.k.data(), c.v.data(),
                {inclusive.data(), strict.data()});
  EXPECT_EQ(inclusive, strict);
  std::vector<float> draws(1024 * 16);
  stream(c.setting, 0, Draw::predictor).normal(draws.data(), draws.size());
  for (int i = 0; i < 1024; i += 97) {
    double error = 0;
    for (int j = 0; j < 16; ++j) error += std::pow(std::sqrt(c.dot(i, i)) * draws[i * 16 + j] - c.value(i, j), 2);
    EXPECT_NEAR(inclusive[i], error, 1e-4 * error);
  }
  double mean = 0, expected = 0;
  for (int i = 0; i < 1024; ++i) {
    mean += inclusive[i];
    expected += 16 * c.dot(i, i);
    for (int j = 0; j < 16; ++j) expected += std::pow(c.value(i, j), 2);
  }
  EXPECT_NEAR(mean / expected, 1, 0.05);
}

}  // namespace
}  // namespace lla::experiments
