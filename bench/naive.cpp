#include "bench/naive.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace lla::bench {
namespace {

using Row = std::vector<float>;

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// sum of coefficient[j] * rows[j]
Row combine(const Row& coefficients, const float* rows, int64_t width) {
  Row sum(static_cast<size_t>(width), 0.0f);
  for (size_t j = 0; j < coefficients.size(); ++j) {
    for (int64_t c = 0; c < width; ++c)
      sum[static_cast<size_t>(c)] += coefficients[j] * rows[static_cast<int64_t>(j) * width + c];
  }
  return sum;
}

// p (k - mean) . u for every key
Row centred(const Row& p, const float* keys, const Row& mean, const Row& u) {
  const int64_t dim = static_cast<int64_t>(u.size());
  const float centre = dot(mean.data(), u.data(), dim);
  Row result(p.size());
  for (size_t j = 0; j < p.size(); ++j)
    result[j] = p[j] * (dot(keys + static_cast<int64_t>(j) * dim, u.data(), dim) - centre);
  return result;
}

Row forward_row(const float* q, const float* keys, const float* values, int64_t count, int64_t dim, float ridge,
                float tolerance) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  Row p(static_cast<size_t>(count));
  for (int64_t j = 0; j < count; ++j) p[static_cast<size_t>(j)] = scale * dot(q, keys + j * dim, dim);
  const float largest = *std::max_element(p.begin(), p.end());
  float omega = 0;
  for (float& x : p) omega += x = std::exp(x - largest);
  for (float& x : p) x /= omega;
  const Row mean = combine(p, keys, dim);
  Row o = combine(p, values, dim);
  Row x(static_cast<size_t>(dim), 0.0f), r(x), u(x);
  for (size_t c = 0; c < x.size(); ++c) u[c] = r[c] = q[c] - mean[c];
  float rr = dot(r.data(), r.data(), dim);
  const float target = tolerance * tolerance * rr;
  for (int iteration = 0; rr > target && iteration < 2 * dim; ++iteration) {
    Row image = combine(centred(p, keys, mean, u), keys, dim);
    for (size_t c = 0; c < x.size(); ++c) image[c] += ridge * u[c];
    const float alpha = rr / dot(u.data(), image.data(), dim);
    for (size_t c = 0; c < x.size(); ++c) {
      x[c] += alpha * u[c];
      r[c] -= alpha * image[c];
    }
    const float previous = rr;
    rr = dot(r.data(), r.data(), dim);
    for (size_t c = 0; c < x.size(); ++c) u[c] = r[c] + rr / previous * u[c];
  }
  const Row slope = combine(centred(p, keys, mean, x), values, dim);
  for (size_t c = 0; c < o.size(); ++c) o[c] += slope[c];
  return o;
}

}  // namespace

double naive_forward_seconds(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                             int64_t n, int64_t dim, float ridge, float tolerance, int64_t first, int64_t count) {
  const auto start = std::chrono::steady_clock::now();
  volatile float keep = 0;  // the results are wanted
  for (int64_t i = first; i < std::min(n, first + count); ++i) {
    keep = keep + forward_row(q.data() + i * dim, k.data(), v.data(), i + 1, dim, ridge, tolerance)[0];
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace lla::bench
