// What the solves of the Hopper decode are tested on: covariances of random vectors with a ridge, in fp64.
#pragma once

#include <cmath>
#include <random>
#include <vector>

template <int kDim>
struct System {
  std::vector<double> a = std::vector<double>(kDim * kDim), b = std::vector<double>(kDim);

  // The covariance of so many random vectors and a ridge; `shrink`: how much shorter the last coordinate is than the
  // first.
  System(int count, double ridge, unsigned seed, double shrink = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<double> k(static_cast<size_t>(count) * kDim);
    for (double& x : k) x = normal(random);
    for (double& x : b) x = normal(random);
    const auto length = [&](int i) { return std::pow(shrink, -double(i) / (kDim - 1)); };
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j < kDim; ++j) {
        double sum = 0;
        for (int n = 0; n < count; ++n) sum += k[n * kDim + i] * k[n * kDim + j] / count;
        a[i * kDim + j] = sum * length(i) * length(j) + (i == j ? ridge : 0);
      }
    }
  }

  std::vector<double> residual(const std::vector<double>& x) const {
    std::vector<double> out(b);
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j < kDim; ++j) out[i] -= a[i * kDim + j] * x[j];
    }
    return out;
  }
  // |A x - b| over |A| |x|: what changes of A would make x exact.
  double backward_error(const std::vector<double>& x) const {
    const auto length = [](const std::vector<double>& v) {
      double sum = 0;
      for (const double e : v) sum += e * e;
      return std::sqrt(sum);
    };
    return length(residual(x)) / (length(a) * length(x));
  }
};
