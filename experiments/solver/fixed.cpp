#include "solver/fixed.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/gemm.hpp"

namespace lla::experiments {
namespace {

constexpr int kPowerSteps = 100;

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

}  // namespace

RowSystem::RowSystem(const Keys& keys, int64_t visible, const float* q, double scale)
    : d_(keys.d), a_(d_ * d_), b_(d_), c_(d_ * d_), mean_v_(d_, 0) {
  const size_t n = visible, d = d_;
  std::vector<double> p(n), mean(d, 0), k(n * d), weighted(n * d), v(n * d);
  double top = -INFINITY, total = 0;
  for (size_t j = 0; j < n; ++j) {
    for (size_t c = 0; c < d; ++c) p[j] += scale * q[c] * keys.k[j * d + c];
    top = std::max(top, p[j]);
  }
  for (double& w : p) total += w = std::exp(w - top);
  for (size_t j = 0; j < n; ++j) {
    p[j] /= total;
    for (size_t c = 0; c < d; ++c) {
      mean[c] += p[j] * keys.k[j * d + c];
      mean_v_[c] += p[j] * keys.v[j * d + c];
    }
  }
  for (size_t j = 0; j < n; ++j) {
    for (size_t c = 0; c < d; ++c) {
      k[j * d + c] = keys.k[j * d + c] - mean[c];
      weighted[j * d + c] = p[j] * k[j * d + c];
      v[j * d + c] = keys.v[j * d + c];
    }
  }
  gemm(d, d, n, 1.0, {weighted.data(), 1, d}, k.data(), d, 0.0, a_.data(), d);
  gemm(d, d, n, 1.0, {weighted.data(), 1, d}, v.data(), d, 0.0, c_.data(), d);  // C', a row for each key's dimension
  for (size_t c = 0; c < d; ++c) b_[c] = q[c] - mean[c];
  Vector u(d, 1.0);
  for (int i = 0; i < kPowerSteps; ++i) {
    Vector image = apply(u, 0);
    const double norm = std::sqrt(dot(image, image));
    if (norm == 0) break;
    largest_ = norm / std::sqrt(dot(u, u));
    for (double& x : image) x /= norm;
    u = std::move(image);
  }
}

RowSystem::Vector RowSystem::apply(const Vector& u, double ridge) const {
  Vector out(d_);
  for (int64_t r = 0; r < d_; ++r) {
    out[r] = std::inner_product(u.begin(), u.end(), a_.begin() + r * d_, ridge * u[r]);
  }
  return out;
}

RowSystem::Vector RowSystem::solve(double ridge) const {
  const size_t d = d_;
  Vector l = a_, x = b_;
  for (size_t i = 0; i < d; ++i) l[i * d + i] += ridge;
  for (size_t j = 0; j < d; ++j) {  // Cholesky, lower triangle
    for (size_t t = 0; t < j; ++t) l[j * d + j] -= l[j * d + t] * l[j * d + t];
    l[j * d + j] = std::sqrt(l[j * d + j]);
    for (size_t i = j + 1; i < d; ++i) {
      for (size_t t = 0; t < j; ++t) l[i * d + j] -= l[i * d + t] * l[j * d + t];
      l[i * d + j] /= l[j * d + j];
    }
  }
  for (size_t i = 0; i < d; ++i) {
    for (size_t t = 0; t < i; ++t) x[i] -= l[i * d + t] * x[t];
    x[i] /= l[i * d + i];
  }
  for (size_t i = d; i-- > 0;) {
    for (size_t t = i + 1; t < d; ++t) x[i] -= l[t * d + i] * x[t];
    x[i] /= l[i * d + i];
  }
  return x;
}

double RowSystem::output_error(const Vector& x, const Vector& exact, const Vector& output) const {
  Vector difference(d_, 0);
  for (int64_t r = 0; r < d_; ++r) {
    for (int64_t c = 0; c < d_; ++c) difference[c] += (x[r] - exact[r]) * c_[r * d_ + c];
  }
  return std::sqrt(dot(difference, difference) / dot(output, output));
}

std::array<double, kSteps.size()> RowSystem::errors(Method method, double ridge) const {
  const Vector exact = solve(ridge);
  Vector output = mean_v_;
  for (int64_t r = 0; r < d_; ++r) {
    for (int64_t c = 0; c < d_; ++c) output[c] += exact[r] * c_[r * d_ + c];
  }
  std::array<double, kSteps.size()> out{};
  Vector x(d_, 0), r = b_, scaling(d_, 1), z, p;
  if (method == Method::diagonal) {
    for (int64_t i = 0; i < d_; ++i) scaling[i] = 1 / (a_[i * d_ + i] + ridge);
  }
  const auto preconditioned = [&] {
    Vector s(d_);
    for (int64_t i = 0; i < d_; ++i) s[i] = scaling[i] * r[i];
    return s;
  };
  z = p = preconditioned();
  double rz = dot(r, z), previous = 0;
  const double middle = ridge + largest_ / 2, half = largest_ / 2;
  size_t next = 0;
  for (int step = 1; step <= kSteps.back(); ++step) {
    if (method == Method::chebyshev) {
      // x_{k+1} = x_k + alpha p_k, p_{k+1} = r + beta p_k with the recurrences for the interval middle ± half.
      const double beta = step == 1   ? 0
                          : step == 2 ? 0.5 * std::pow(half * previous, 2)
                                      : std::pow(half * previous / 2, 2);
      const double alpha = step == 1 ? 1 / middle : 1 / (middle - beta / previous);
      for (int64_t i = 0; i < d_; ++i) p[i] = r[i] + beta * p[i];
      const Vector ap = apply(p, ridge);
      for (int64_t i = 0; i < d_; ++i) x[i] += alpha * p[i], r[i] -= alpha * ap[i];
      previous = alpha;
    } else if (rz > 0) {
      const Vector ap = apply(p, ridge);
      const double curvature = dot(p, ap);
      if (curvature > 0) {
        const double alpha = rz / curvature;
        for (int64_t i = 0; i < d_; ++i) x[i] += alpha * p[i], r[i] -= alpha * ap[i];
        z = preconditioned();
        const double after = dot(r, z);
        for (int64_t i = 0; i < d_; ++i) p[i] = z[i] + after / rz * p[i];
        rz = after;
      }
    }
    if (step == kSteps[next]) out[next++] = output_error(x, exact, output);
  }
  return out;
}

}  // namespace lla::experiments
