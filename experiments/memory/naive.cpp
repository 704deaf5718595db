#include "memory/naive.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "common/gemm.hpp"
#include "common/parallel.hpp"

namespace lla::experiments {
namespace {

constexpr int64_t kChunk = 256;  // keys whose differences are weighted at a time

// Solves a x = b in place by Cholesky; a (d, d) is overwritten.
void solve(int64_t d, float* a, float* b) {
  for (int64_t j = 0; j < d; ++j) {
    for (int64_t t = 0; t < j; ++t) {
      for (int64_t i = j; i < d; ++i) a[j * d + i] -= a[t * d + j] * a[t * d + i];  // upper triangle, row by row
    }
    const float pivot = std::sqrt(a[j * d + j]);
    for (int64_t i = j; i < d; ++i) a[j * d + i] /= pivot;
  }
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t t = 0; t < i; ++t) b[i] -= a[t * d + i] * b[t];
    b[i] /= a[i * d + i];
  }
  for (int64_t i = d - 1; i >= 0; --i) {
    for (int64_t t = i + 1; t < d; ++t) b[i] -= a[i * d + t] * b[t];
    b[i] /= a[i * d + i];
  }
}

}  // namespace

double naive_bytes(const NaiveSizes& s) {
  const double rows = double(s.batch) * s.queries;
  return 4.0 * rows * (double(s.keys) * (1 + s.dim) + double(s.dim) * s.dim);
}

void naive_lla(const NaiveSizes& sizes, double scale, double ridge, const float* q, const float* keys,
               const float* values, float* o, int threads) {
  const int64_t n = sizes.keys, d = sizes.dim, rows = sizes.batch * sizes.queries;
  const auto floats = [](int64_t count) { return std::make_unique_for_overwrite<float[]>(count); };
  const auto weights = floats(rows * n), z = floats(rows * n * d), sigma = floats(rows * d * d);
  parallel_for(rows, threads, [&](int64_t row, int) {
    const int64_t last = row % sizes.queries + n - sizes.queries;  // the last key the query sees
    const float* k = keys + row / sizes.queries * n * d;
    const float* v = values + row / sizes.queries * n * d;
    float* w = weights.get() + row * n;
    float* zi = z.get() + row * n * d;
    float top = -INFINITY;
    for (int64_t j = 0; j < n; ++j) {
      float logit = 0;
      for (int64_t c = 0; c < d; ++c) {
        logit += q[row * d + c] * k[j * d + c];
        zi[j * d + c] = k[j * d + c] - q[row * d + c];
      }
      w[j] = j <= last ? static_cast<float>(scale) * logit : -INFINITY;
      top = std::max(top, w[j]);
    }
    float omega = 0;
    for (int64_t j = 0; j < n; ++j) omega += w[j] = std::exp(w[j] - top);
    std::vector<float> weighted(kChunk * d), mu(d, 0.0f), rho(d);
    float* s = sigma.get() + row * d * d;
    for (int64_t first = 0; first <= last; first += kChunk) {
      const int64_t count = std::min(kChunk, last + 1 - first);
      const float* from = zi + first * d;
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t c = 0; c < d; ++c) mu[c] += weighted[j * d + c] = w[first + j] * from[j * d + c];
      }
      gemm(d, d, count, 1.0f, {weighted.data(), 1, size_t(d)}, from, d, first == 0 ? 0.0f : 1.0f, s, d);
    }
    for (int64_t c = 0; c < d; ++c) s[c * d + c] += static_cast<float>(ridge) * omega;
    rho = mu;
    solve(d, s, rho.data());
    float delta = omega;
    for (int64_t c = 0; c < d; ++c) delta -= mu[c] * rho[c];
    std::vector<float> share(last + 1);
    for (int64_t j = 0; j <= last; ++j) {
      float dot = 0;
      for (int64_t c = 0; c < d; ++c) dot += zi[j * d + c] * rho[c];
      share[j] = w[j] * (1 - dot) / delta;
    }
    gemm(1, d, last + 1, 1.0f, {share.data(), 0, 1}, v, d, 0.0f, o + row * d, d);
  });
}

}  // namespace lla::experiments
