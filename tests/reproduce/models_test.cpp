// Each recurrent model against a plain fp64 loop that starts from its definition at every position.
#include "regression/models.hpp"

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "regression/data.hpp"

namespace lla::experiments {
namespace {

struct Case {
  RegressionSetting setting;
  std::vector<float> k, v, q, target;

  Case(int length, int d, int segment, uint64_t seed, std::optional<double> query_noise = {}) {
    setting = {.length = length, .d = d, .segment = segment, .sequences = 1, .query_noise = query_noise, .seed = seed};
    for (auto* x : {&k, &v, &q, &target}) x->resize(size_t(length) * d);
    PiecewiseLinear(setting).generate(0, sequence());
  }
  // With queries of their own where the setting has noise on them.
  Sequence sequence() {
    if (!setting.query_noise) return {k.data(), v.data(), k.data(), v.data()};
    return {k.data(), v.data(), q.data(), target.data()};
  }
  double query(int i, int j) const { return setting.query_noise ? q[size_t(i) * setting.d + j] : key(i, j); }
  double answer(int i, int j) const { return setting.query_noise ? target[size_t(i) * setting.d + j] : value(i, j); }
  double key(int i, int j) const { return k[size_t(i) * setting.d + j]; }
  double value(int i, int j) const { return v[size_t(i) * setting.d + j]; }
  double dot(int i, int j) const {
    double sum = 0;
    for (int c = 0; c < setting.d; ++c) sum += query(i, c) * key(j, c);
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
    q[a] = c.query(i, a);
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
    error += std::pow(o - c.answer(i, out), 2);
  }
  return error;
}

double plain_linear(const Case& c, int i, bool strict) {
  double error = 0;
  for (int out = 0; out < c.setting.d; ++out) {
    double o = 0;
    for (int j = 0; j <= (strict ? i - 1 : i); ++j) o += c.value(j, out) * c.dot(i, j);
    error += std::pow(o - c.answer(i, out), 2);
  }
  return error;
}

// Lengths that are and are not multiples of the block, dimensions below and above a SIMD vector, queries that are the
// keys and queries of their own.
struct Shape {
  int length, d, segment;
  std::optional<double> noise;
};
const std::vector<Shape> kShapes = {{32, 4, 8, {}},  {96, 8, 24, {}},  {80, 24, 80, {}},
                                    {64, 6, 64, {}}, {80, 8, 20, 0.3}, {64, 24, 64, 1.0}};

TEST(MesaNet, AgainstPlainLoop) {
  for (const auto& [length, d, segment, noise] : kShapes) {
    for (const double ridge : {1.0, 1e-3}) {
      Case c(length, d, segment, 11, noise);
      std::vector<double> inclusive(length), strict(length);
      mesanet_errors(length, d, ridge, c.sequence(), {inclusive.data(), strict.data()});
      for (int i = 0; i < length; ++i) {
        const double a = plain_mesanet(c, ridge, i, false), b = plain_mesanet(c, ridge, i, true);
        ASSERT_NEAR(inclusive[i], a, 1e-8 * (a + ridge)) << "position " << i << " d " << d << " ridge " << ridge;
        ASSERT_NEAR(strict[i], b, 1e-8 * (b + ridge)) << "position " << i << " d " << d << " ridge " << ridge;
      }
    }
  }
}

// Over a whole sequence of the paper's length the recursion stays exact: its last position against a solve from
// scratch.
TEST(MesaNet, StaysExactOverALongSequence) {
  Case c(1024, 32, 128, 5);
  std::vector<double> inclusive(1024), strict(1024);
  mesanet_errors(1024, 32, 1.0, c.sequence(), {inclusive.data(), strict.data()});
  for (int i : {500, 1023}) {
    EXPECT_NEAR(inclusive[i], plain_mesanet(c, 1.0, i, false), 1e-9 * inclusive[i]);
    EXPECT_NEAR(strict[i], plain_mesanet(c, 1.0, i, true), 1e-9 * strict[i]);
  }
}

TEST(LinearAttention, AgainstPlainLoop) {
  for (const auto& [length, d, segment, noise] : kShapes) {
    Case c(length, d, segment, 12, noise);
    std::vector<double> inclusive(length), strict(length);
    linear_errors(length, d, c.sequence(), {inclusive.data(), strict.data()});
    for (int i = 0; i < length; ++i) {
      const double a = plain_linear(c, i, false), b = plain_linear(c, i, true);
      ASSERT_NEAR(inclusive[i], a, 1e-4 * a) << "position " << i << " d " << d;
      ASSERT_NEAR(strict[i], b, 1e-4 * b) << "position " << i << " d " << d;
    }
  }
}

// The guess is |k| times a standard normal vector: its expected error is known.
TEST(RandomPredictor, HasTheErrorOfAnIndependentMap) {
  Case c(1024, 16, 1024, 3);
  std::vector<double> inclusive(1024), strict(1024);
  random_errors(1024, 16, stream(c.setting, 0, Draw::predictor), c.sequence(), {inclusive.data(), strict.data()});
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

// What a query without noise asks is its key; without noise on the values the answer is the value.
TEST(PiecewiseLinear, QueriesBetweenTheKeyAndAFreshOne) {
  const auto make = [](double rho, bool norm) {
    RegressionSetting s{.length = 512, .d = 16, .segment = 64, .sequences = 1, .noise = 0, .qk_norm = norm, .seed = 9};
    s.query_noise = rho;
    std::vector<float> x[4];
    for (auto& v : x) v.resize(512 * 16);
    PiecewiseLinear(s).generate(0, {x[0].data(), x[1].data(), x[2].data(), x[3].data()});
    return std::array<std::vector<float>, 4>{x[0], x[1], x[2], x[3]};
  };
  const auto same = make(0, false);
  EXPECT_EQ(same[2], same[0]);
  EXPECT_EQ(same[3], same[1]);
  for (const double rho : {0.3, 1.0}) {
    const auto [k, v, q, target] = make(rho, false);
    double dot = 0, kk = 0, qq = 0;
    for (int i = 0; i < 512; ++i) {
      for (int j = 0; j < 16; ++j) {
        const float a = k[i * 16 + j], b = q[i * 16 + j];
        if (j < 3) {
          EXPECT_EQ(std::signbit(a), std::signbit(b));  // the same cone
        } else {
          dot += double(a) * b, kk += double(a) * a, qq += double(b) * b;
        }
      }
    }
    EXPECT_NEAR(dot / kk, std::sqrt(1 - rho * rho), 0.05) << rho;
    EXPECT_NEAR(qq / kk, 1, 0.05) << rho;
  }
  // Normalised before the values are made: length sqrt(d), and v = A k of the normalised key (answers to equal queries
  // agree).
  const auto normal = make(0, true);
  EXPECT_EQ(normal[3], normal[1]);
  for (int i = 0; i < 512; ++i) {
    double squares = 0;
    for (int j = 0; j < 16; ++j) squares += double(normal[0][i * 16 + j]) * normal[0][i * 16 + j];
    EXPECT_NEAR(squares, 16, 1e-4);
  }
}

}  // namespace
}  // namespace lla::experiments
