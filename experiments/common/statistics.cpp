#include "common/statistics.hpp"

#include <cmath>
#include <numeric>

namespace lla::experiments {
namespace {

using Vector = std::vector<double>;

double dot(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// y without its projection on the constant and, if given, on z.
Vector residual(Vector y, const Vector& z) {
  const auto center = [](Vector& v) {
    const double m = mean(v);
    for (double& e : v) e -= m;
  };
  center(y);
  if (z.empty()) return y;
  Vector c = z;
  center(c);
  const double share = dot(y, c) / dot(c, c);
  for (size_t i = 0; i < y.size(); ++i) y[i] -= share * c[i];
  return y;
}

// Variance of log(mean y), by the delta method.
double log_mean_variance(const Vector& y) {
  if (y.size() < 2) return 0;
  const double m = mean(y);
  double squares = 0;
  for (double e : y) squares += (e - m) * (e - m);
  return squares / static_cast<double>(y.size() - 1) / static_cast<double>(y.size()) / (m * m);
}

}  // namespace

double mean(const std::vector<double>& v) {
  return std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(v.size());
}

double normal_quantile(double upper_tail) {
  double low = 0, high = 10;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(middle / std::sqrt(2.0)) > upper_tail ? low : high) = middle;
  }
  return low;
}

Slope fit_exponent(const std::vector<Measured>& points, bool with_correction, int intervals) {
  Vector x, y, z;
  for (const auto& p : points) {
    x.push_back(std::log(p.x));
    y.push_back(std::log(mean(p.y)));
    if (with_correction) z.push_back(p.correction);
  }
  // The slope is a fixed linear combination of the y: with the constant (and z) taken out of x, slope = rx·y / rx·rx.
  const Vector rx = residual(x, z);
  const double norm = dot(rx, rx), slope = dot(rx, y) / norm;
  double variance = 0;
  for (size_t i = 0; i < points.size(); ++i) variance += rx[i] * rx[i] / (norm * norm) * log_mean_variance(points[i].y);
  const double reach = normal_quantile(0.025 / intervals) * std::sqrt(variance);
  return {slope, slope - reach, slope + reach, mean(y) - slope * mean(x)};
}

}  // namespace lla::experiments
