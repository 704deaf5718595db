// The elimination of the Hopper decode's solve, thread by thread on the CPU, against fp64; what no step has written is
// NaN.
#include "cuda/sm90/decode/eliminate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

namespace lla::cuda::sm90::decode {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <int kDim>
struct System {
  std::vector<double> a = std::vector<double>(kDim * kDim), b = std::vector<double>(kDim);
  std::unique_ptr<Matrix<kDim>> m = std::make_unique<Matrix<kDim>>();

  // The covariance of so many random vectors and a ridge.
  System(int count, double ridge, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<double> k(static_cast<size_t>(count) * kDim);
    for (double& x : k) x = normal(random);
    for (double& x : b) x = normal(random);
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j < kDim; ++j) {
        double sum = i == j ? ridge : 0;
        for (int n = 0; n < count; ++n) sum += k[n * kDim + i] * k[n * kDim + j] / count;
        a[i * kDim + j] = sum;
      }
    }
  }

  // x of the elimination, in the kernel's order up to the back substitution.
  std::vector<double> solve(float limit) {
    for (const std::span<float> s :
         {std::span<float>(m->lower), std::span<float>(m->columns[0]), std::span<float>(m->columns[1]),
          std::span<float>(m->right), std::span<float>(m->pivot)})
      std::fill(s.begin(), s.end(), kNan);
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j <= i; ++j) m->at(i, j) = static_cast<float>(a[i * kDim + j]);
      const float start = m->at(i, i), scale = diagonal_scale(start);
      m->scale[i] = scale;
      m->rhs[i] = static_cast<float>(b[i]) * scale;
      m->start[i] = start * scale * scale;
      m->limit[i] = limit * m->start[i];
      EXPECT_TRUE(start == 0 || (m->start[i] >= 1 && m->start[i] < 4)) << start;
    }
    std::vector<Remaining<kDim>> threads;
    for (unsigned t = 0; t < kSolveThreads; ++t) threads.emplace_back(*m, t);
    for (const auto& t : threads) t.publish(*m);
    for (unsigned panel = 0; panel < kDim / kPanel; ++panel) {
      for (unsigned t = 0; t < kSolveThreads; ++t) eliminate_panel(*m, panel, t, [](float x) { return 1 / x; });
      if (panel + 1 == kDim / kPanel) break;
      for (auto& t : threads) t.update(*m, panel);
    }
    std::vector<double> x(kDim);
    for (int i = kDim - 1; i >= 0; --i) {
      x[i] = m->rhs[i];
      for (int j = i + 1; j < kDim; ++j) x[i] -= m->at(j, i) * x[j];
    }
    for (int i = 0; i < kDim; ++i) x[i] *= m->scale[i];
    return x;
  }

  // |A x - b| over |A| |x|: what changes of A would make x exact.
  double backward_error(const std::vector<double>& x) const {
    double off = 0, matrix = 0, length = 0;
    for (int i = 0; i < kDim; ++i) {
      double sum = -b[i];
      for (int j = 0; j < kDim; ++j) sum += a[i * kDim + j] * x[j];
      off += sum * sum, length += x[i] * x[i];
    }
    for (const double e : a) matrix += e * e;
    return std::sqrt(off / (matrix * length));
  }
};

template <class T>
class DecodeEliminate : public testing::Test {};
using Dims = testing::Types<std::integral_constant<int, 64>, std::integral_constant<int, 128>>;
TYPED_TEST_SUITE(DecodeEliminate, Dims);

TYPED_TEST(DecodeEliminate, SolvesWhatItIsGiven) {
  constexpr int kDim = TypeParam::value;
  for (const double ridge : {1.0, 0.01, 1e-4}) {
    for (const int count : {kDim / 4, 4 * kDim}) {
      System<kDim> s(count, ridge, 3);
      EXPECT_LE(s.backward_error(s.solve(0x1p-20f)), 0x1p-22) << ridge << ", " << count << " keys";
      for (const float pivot : s.m->pivot) EXPECT_GT(pivot, 0);
    }
  }
}

// Columns of very different sizes, and all of them far from one.
TYPED_TEST(DecodeEliminate, ScalesDoNotMatter) {
  constexpr int kDim = TypeParam::value;
  System<kDim> plain(4 * kDim, 0.01, 3), scaled(4 * kDim, 0.01, 3);
  const auto size = [](int i) { return std::ldexp(1.0, -25 - i * 37 % 16); };
  for (int i = 0; i < kDim; ++i) {
    for (int j = 0; j < kDim; ++j) scaled.a[i * kDim + j] *= size(i) * size(j);
    scaled.b[i] *= size(i);
  }
  const std::vector<double> x = plain.solve(0x1p-20f), y = scaled.solve(0x1p-20f);
  for (int i = 0; i < kDim; ++i) EXPECT_EQ(y[i] * size(i), x[i]) << i;
}

// Fewer keys than dimensions and no ridge: what rounding has left of a pivot is dropped, x is finite and solves the rest.
TYPED_TEST(DecodeEliminate, DropsPivotsThatAreRounding) {
  constexpr int kDim = TypeParam::value;
  System<kDim> s(kDim / 4, 0, 5);
  std::vector<double> keys_only(kDim);
  for (int i = 0; i < kDim; ++i) {  // a right-hand side within the range
    for (int j = 0; j < kDim; ++j) keys_only[i] += s.a[i * kDim + j] * s.b[j];
  }
  s.b = keys_only;
  EXPECT_LE(s.backward_error(s.solve(0x1p-16f)), 0x1p-16);
  int dropped = 0;
  for (int i = 0; i < kDim; ++i) dropped += s.m->pivot[i] <= s.m->limit[i];
  EXPECT_EQ(dropped, kDim - kDim / 4);
}

}  // namespace
}  // namespace lla::cuda::sm90::decode
