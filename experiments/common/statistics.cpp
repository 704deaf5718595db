#include "common/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/random.hpp"

namespace lla::experiments {
namespace {

constexpr int kResamples = 2000;

struct Line {
  double slope, intercept;
};

using Vector = std::vector<double>;

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
  const double share = std::inner_product(y.begin(), y.end(), c.begin(), 0.0) / std::inner_product(c.begin(), c.end(), c.begin(), 0.0);
  for (size_t i = 0; i < y.size(); ++i) y[i] -= share * c[i];
  return y;
}

// Slope of y on x, with the constant (and z) taken out of both.
Line fit(const Vector& x, const Vector& y, const Vector& z) {
  const Vector rx = residual(x, z), ry = residual(y, z);
  const double slope = std::inner_product(rx.begin(), rx.end(), ry.begin(), 0.0) / std::inner_product(rx.begin(), rx.end(), rx.begin(), 0.0);
  return {slope, mean(y) - slope * mean(x)};
}

}  // namespace

double mean(const std::vector<double>& v) { return std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(v.size()); }

Slope fit_exponent(const std::vector<Measured>& points, bool with_correction, uint64_t seed) {
  Vector x, y, z;
  for (const auto& p : points) {
    x.push_back(std::log(p.x));
    y.push_back(std::log(mean(p.y)));
    if (with_correction) z.push_back(p.correction);
  }
  const Line line = fit(x, y, z);
  const Stream stream(seed, points.size(), 0);
  Vector slopes;
  uint64_t draw = 0;
  for (int r = 0; r < kResamples; ++r) {
    for (size_t i = 0; i < points.size(); ++i) {
      const auto& values = points[i].y;
      double sum = 0;
      for (size_t t = 0; t < values.size(); ++t) sum += values[static_cast<size_t>(stream.uniform(draw++) * values.size())];
      y[i] = std::log(sum / static_cast<double>(values.size()));
    }
    slopes.push_back(fit(x, y, z).slope);
  }
  std::sort(slopes.begin(), slopes.end());
  const auto quantile = [&](double q) { return slopes[static_cast<size_t>(q * (kResamples - 1))]; };
  return {line.slope, quantile(0.025), quantile(0.975), line.intercept};
}

}  // namespace lla::experiments
