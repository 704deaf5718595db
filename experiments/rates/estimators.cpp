#include "rates/estimators.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lla::experiments {
namespace {

constexpr int kUnknowns = kMaxRateDim + 1;

// Weighted least squares on (1, z): accumulates the normal equations and solves them by Cholesky.
class Plane {
 public:
  explicit Plane(int d) : m_(d + 1) {}

  void add(double w, const double* z, double y) {
    for (int i = 0; i < m_; ++i) {
      const double wi = w * (i == 0 ? 1 : z[i - 1]);
      for (int j = 0; j <= i; ++j) a_[i][j] += wi * (j == 0 ? 1 : z[j - 1]);
      b_[i] += wi * y;
    }
  }

  // False when the points do not determine a plane.
  bool solve(double* out) {
    for (int j = 0; j < m_; ++j) {
      const double before = a_[j][j];
      for (int t = 0; t < j; ++t) a_[j][j] -= a_[j][t] * a_[j][t];
      if (!(a_[j][j] > 1e-10 * before)) return false;
      a_[j][j] = std::sqrt(a_[j][j]);
      for (int i = j + 1; i < m_; ++i) {
        for (int t = 0; t < j; ++t) a_[i][j] -= a_[i][t] * a_[j][t];
        a_[i][j] /= a_[j][j];
      }
    }
    for (int i = 0; i < m_; ++i) {
      for (int t = 0; t < i; ++t) b_[i] -= a_[i][t] * b_[t];
      b_[i] /= a_[i][i];
    }
    for (int i = m_ - 1; i >= 0; --i) {
      for (int t = i + 1; t < m_; ++t) b_[i] -= a_[t][i] * out[t];
      out[i] = b_[i] / a_[i][i];
    }
    return true;
  }

 private:
  int m_;
  double a_[kUnknowns][kUnknowns] = {};
  double b_[kUnknowns] = {};
};

}  // namespace

double target(int d, const Point& x) {
  double squares = 0;
  for (int j = 0; j < d; ++j) squares += x[j] * x[j];
  return 4 * x[0] + 2 * squares;
}

Point ball_point(const Stream& stream, int d, uint64_t index, int strata) {
  float g[8];
  stream.normal(g, 8, index * 8);
  double norm = 0;
  for (int j = 0; j < d; ++j) norm += double(g[j]) * g[j];
  const double volume = strata > 0 ? (index + stream.uniform(index)) / strata : stream.uniform(index);
  const double radius = std::pow(volume, 1.0 / d) / std::sqrt(norm);
  Point x{};
  for (int j = 0; j < d; ++j) x[j] = g[j] * radius;
  return x;
}

Sample::Sample(const Stream& stream, int d, int64_t n, double noise) : d_(d), n_(n), x_(n), y_(n) {
  for (int64_t i = 0; i < n; ++i) x_[i] = ball_point(stream, d, i);
  std::sort(x_.begin(), x_.end());
  std::vector<float> e(n);
  stream.normal(e.data(), n, static_cast<uint64_t>(n) * 8);
  for (int64_t i = 0; i < n; ++i) y_[i] = target(d, x_[i]) + noise * e[i];
  mean_ = std::accumulate(y_.begin(), y_.end(), 0.0) / static_cast<double>(n);
  fit_global();
}

void Sample::fit_global() {
  Plane plane(d_);
  for (int64_t i = 0; i < n_; ++i) plane.add(1, x_[i].data(), y_[i]);
  plane.solve(global_.data());
}

template <class F>
void Sample::neighbours(const Point& x, double h, F&& f) const {
  const auto by_first = [](const Point& p, double v) { return p[0] < v; };
  auto i = std::lower_bound(x_.begin(), x_.end(), x[0] - h, by_first) - x_.begin();
  for (; i < n_ && x_[i][0] < x[0] + h; ++i) {
    double z[kMaxRateDim], squares = 0;
    for (int j = 0; j < d_; ++j) {
      z[j] = (x_[i][j] - x[j]) / h;
      squares += z[j] * z[j];
    }
    if (squares < 1) f(1 - squares, z, y_[i]);
  }
}

double Sample::local_constant(const Point& x, double h) const {
  double weight = 0, sum = 0;
  neighbours(x, h, [&](double w, const double*, double y) { weight += w, sum += w * y; });
  return weight > 0 ? sum / weight : mean_;
}

double Sample::local_linear(const Point& x, double h) const {
  Plane plane(d_);
  neighbours(x, h, [&](double w, const double* z, double y) { plane.add(w, z, y); });
  double solution[kUnknowns];
  return plane.solve(solution) ? solution[0] : local_constant(x, h);
}

double Sample::global_linear(const Point& x) const {
  return std::inner_product(x.begin(), x.begin() + d_, global_.begin() + 1, global_[0]);
}

}  // namespace lla::experiments
