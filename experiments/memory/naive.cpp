#include "memory/naive.hpp"

#include <cmath>
#include <memory>
#include <vector>

#include "common/gemm.hpp"
#include "common/parallel.hpp"

namespace lla::experiments {
namespace {

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

double naive_bytes(int64_t n, int64_t d) { return 4.0 * (double(n) * n + double(n) * n * d + double(n) * d * d); }

void naive_lla(int64_t n, int64_t d, double scale, double ridge, const float* q, const float* k, const float* v,
               float* o, int threads) {
  const auto floats = [](int64_t count) { return std::make_unique_for_overwrite<float[]>(count); };
  const auto weights = floats(n * n), z = floats(n * n * d), sigma = floats(n * d * d);
  parallel_for(n, threads, [&](int64_t i, int) {
    float* w = weights.get() + i * n;
    float* zi = z.get() + i * n * d;
    float top = -INFINITY;
    for (int64_t j = 0; j < n; ++j) {
      float logit = 0;
      for (int64_t c = 0; c < d; ++c) {
        logit += q[i * d + c] * k[j * d + c];
        zi[j * d + c] = k[j * d + c] - q[i * d + c];
      }
      w[j] = j <= i ? static_cast<float>(scale) * logit : -INFINITY;
      top = std::max(top, w[j]);
    }
    float omega = 0;
    for (int64_t j = 0; j < n; ++j) omega += w[j] = std::exp(w[j] - top);
    std::vector<float> weighted((i + 1) * d), mu(d, 0.0f), rho(d);
    for (int64_t j = 0; j <= i; ++j) {
      for (int64_t c = 0; c < d; ++c) mu[c] += weighted[j * d + c] = w[j] * zi[j * d + c];
    }
    float* s = sigma.get() + i * d * d;
    gemm(d, d, i + 1, 1.0f, {weighted.data(), 1, size_t(d)}, zi, d, 0.0f, s, d);
    for (int64_t c = 0; c < d; ++c) s[c * d + c] += static_cast<float>(ridge) * omega;
    rho = mu;
    solve(d, s, rho.data());
    float delta = omega;
    for (int64_t c = 0; c < d; ++c) delta -= mu[c] * rho[c];
    std::vector<float> share(i + 1);
    for (int64_t j = 0; j <= i; ++j) {
      float dot = 0;
      for (int64_t c = 0; c < d; ++c) dot += zi[j * d + c] * rho[c];
      share[j] = w[j] * (1 - dot) / delta;
    }
    gemm(1, d, i + 1, 1.0f, {share.data(), 0, 1}, v, d, 0.0f, o + i * d, d);
  });
}

}  // namespace lla::experiments
