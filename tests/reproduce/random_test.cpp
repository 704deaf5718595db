#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "common/gemm.hpp"
#include "common/random.hpp"
#include "regression/data.hpp"

namespace lla::experiments {
namespace {

// The generator's published test vectors (Random123, threefry2x32 with 20 rounds).
TEST(Random, ThreefryKnownAnswers) {
  const auto check = [](Block counter, Block key, Block expected) {
    const Block got = threefry(counter, key);
    EXPECT_EQ(got.x0, expected.x0);
    EXPECT_EQ(got.x1, expected.x1);
  };
  check({0, 0}, {0, 0}, {0x6b200159u, 0x99ba4efeu});
  check({0xffffffffu, 0xffffffffu}, {0xffffffffu, 0xffffffffu}, {0x1cb996fcu, 0xbb002be7u});
  check({0x243f6a88u, 0x85a308d3u}, {0x13198a2eu, 0x03707344u}, {0xc4923a9cu, 0x483df7a0u});
}

TEST(Random, AnyPartOfAStreamIsTheSame) {
  const Stream stream(7, 3, 1);
  std::vector<float> whole(1000);
  stream.normal(whole.data(), whole.size());
  for (size_t start : {0, 2, 38, 500}) {
    for (size_t count : {1, 2, 3, 31, 33, 100}) {
      std::vector<float> part(count);
      stream.normal(part.data(), count, start);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(part[i], whole[start + i]) << start << " " << i;
    }
  }
}

TEST(Random, NormalMomentsAndTails) {
  const size_t n = 1 << 20;
  std::vector<float> x(n);
  Stream(1, 2, 3).normal(x.data(), n);
  double sum = 0, squares = 0, fourth = 0, neighbours = 0, beyond = 0;
  for (size_t i = 0; i < n; ++i) {
    sum += x[i], squares += double(x[i]) * x[i], fourth += std::pow(x[i], 4);
    if (i > 0) neighbours += double(x[i]) * x[i - 1];
    beyond += std::abs(x[i]) > 3;
  }
  // Four standard errors each.
  EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 4 * std::sqrt(2.0 / n));
  EXPECT_NEAR(fourth / n, 3, 4 * std::sqrt(96.0 / n));
  EXPECT_NEAR(neighbours / n, 0, 4 / std::sqrt(n));
  EXPECT_NEAR(beyond / n, 0.0026998, 4 * std::sqrt(0.0027 / n));
}

TEST(Random, StreamsDiffer) {
  float a[8], b[8], c[8], d[8];
  Stream(1, 2, 3).normal(a, 8);
  Stream(2, 2, 3).normal(b, 8);
  Stream(1, 3, 3).normal(c, 8);
  Stream(1, 2, 4).normal(d, 8);
  for (int i = 0; i < 8; ++i) {
    EXPECT_NE(a[i], b[i]);
    EXPECT_NE(a[i], c[i]);
    EXPECT_NE(a[i], d[i]);
  }
}

template <class T>
void check_gemm(size_t m, size_t n, size_t k, bool transposed, T beta, double tolerance) {
  std::vector<float> draws(m * k + k * n + m * n);
  Stream(m * 1000 + n, k, transposed).normal(draws.data(), draws.size());
  std::vector<T> a(draws.begin(), draws.begin() + m * k), b(draws.begin() + m * k, draws.begin() + m * k + k * n);
  std::vector<T> c(draws.begin() + m * k + k * n, draws.end());
  const Strided<T> view = transposed ? Strided<T>{a.data(), 1, m} : Strided<T>{a.data(), k, 1};
  const std::vector<T> before = c;
  gemm(m, n, k, T(1.5), view, b.data(), n, beta, c.data(), n);
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      double sum = 0;
      for (size_t t = 0; t < k; ++t) sum += double(view.data[i * view.row + t * view.column]) * b[t * n + j];
      ASSERT_NEAR(c[i * n + j], 1.5 * sum + beta * before[i * n + j], tolerance * (1 + std::sqrt(double(k))))
          << m << " " << n << " " << k;
    }
  }
}

TEST(Gemm, AgainstPlainLoops) {
  for (size_t m : {1, 5, 6, 13}) {
    for (size_t n : {1, 3, 8, 21, 64}) {
      for (size_t k : {1, 7, 32}) {
        for (bool transposed : {false, true}) {
          check_gemm<float>(m, n, k, transposed, 0.5f, 2e-6);
          check_gemm<double>(m, n, k, transposed, -2.0, 1e-14);
          check_gemm<double>(m, n, k, transposed, 0.0, 1e-14);
        }
      }
    }
  }
}

TEST(PiecewiseLinear, KeysLieInTheirConesAndValuesAreLinear) {
  const RegressionSetting s{.length = 64, .d = 8, .segment = 16, .sequences = 1, .noise = 0};
  std::vector<float> k(64 * 8), v(64 * 8);
  PiecewiseLinear(s).generate(5, {k.data(), v.data(), k.data(), v.data()});
  std::vector<float> map(4 * 64);
  stream(s, 5, Draw::maps).normal(map.data(), map.size());
  for (int i = 0; i < 64; ++i) {
    const int c = i / 16 + 1;
    for (int j = 0; j < 2; ++j)
      EXPECT_EQ(k[i * 8 + j] > 0, (c >> j & 1) == 1) << "position " << i << " coordinate " << j;
    for (int out = 0; out < 8; ++out) {
      double expected = 0;
      for (int j = 0; j < 8; ++j) expected += double(map[(c - 1) * 64 + j * 8 + out]) * k[i * 8 + j];
      EXPECT_NEAR(v[i * 8 + out], expected, 1e-5);
    }
  }
}

TEST(PiecewiseLinear, NoiseHasItsSize) {
  RegressionSetting s{.length = 1024, .d = 16, .segment = 256, .sequences = 1, .noise = 0};
  const size_t size = 1024 * 16;
  std::vector<float> k(size), clean(size), noisy(size);
  PiecewiseLinear(s).generate(0, {k.data(), clean.data(), k.data(), clean.data()});
  s.noise = 0.1;
  PiecewiseLinear(s).generate(0, {k.data(), noisy.data(), k.data(), noisy.data()});
  double squares = 0;
  for (size_t i = 0; i < size; ++i) squares += std::pow(noisy[i] - clean[i], 2);
  EXPECT_NEAR(std::sqrt(squares / size), 0.1, 0.002);
}

}  // namespace
}  // namespace lla::experiments
