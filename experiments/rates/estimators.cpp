#include "rates/estimators.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lla::experiments {
namespace {

constexpr int kUnknowns = kMaxRateDim + 1;
constexpr int kCells = 64;  // per side of the grid over [-1, 1]^2

int cell(double coordinate) { return std::clamp(static_cast<int>((coordinate + 1) * (kCells / 2.0)), 0, kCells - 1); }

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

Sample::Sample(const Stream& stream, int d, int64_t n, double noise)
    : d_(d), n_(n), x_(n), y_(n), cell_start_(kCells * kCells + 1, 0) {
  std::vector<Point> drawn(n);
  for (int64_t i = 0; i < n; ++i) drawn[i] = ball_point(stream, d, i);
  const auto cell_of = [](const Point& p) { return cell(p[0]) * kCells + cell(p[1]); };
  for (const Point& p : drawn) ++cell_start_[cell_of(p) + 1];
  std::partial_sum(cell_start_.begin(), cell_start_.end(), cell_start_.begin());
  std::vector<int32_t> next = cell_start_;
  for (const Point& p : drawn) x_[next[cell_of(p)]++] = p;
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

template <int kDim>
Sample::Estimates Sample::local_in(const Point& x, double h_constant, double h_linear) const {
  Plane plane(kDim);
  double weight = 0, sum = 0;
  const double reach = std::max(h_constant, h_linear);
  for (int row = cell(x[0] - reach); row <= cell(x[0] + reach); ++row) {
    const int32_t end = cell_start_[row * kCells + cell(x[1] + reach) + 1];
    for (int32_t i = cell_start_[row * kCells + cell(x[1] - reach)]; i < end; ++i) {
      double z[kDim], squares = 0;
      for (int j = 0; j < kDim; ++j) {
        z[j] = x_[i][j] - x[j];
        squares += z[j] * z[j];
      }
      if (squares < h_constant * h_constant) {
        const double w = 1 - squares / (h_constant * h_constant);
        weight += w, sum += w * y_[i];
      }
      if (squares < h_linear * h_linear) {
        for (double& c : z) c /= h_linear;
        plane.add(1 - squares / (h_linear * h_linear), z, y_[i]);
      }
    }
  }
  const double constant = weight > 0 ? sum / weight : mean_;
  double solution[kUnknowns];
  return {constant, plane.solve(solution) ? solution[0] : constant};
}

Sample::Estimates Sample::local(const Point& x, double h_constant, double h_linear) const {
  switch (d_) {
    case 1: return local_in<1>(x, h_constant, h_linear);
    case 2: return local_in<2>(x, h_constant, h_linear);
    case 3: return local_in<3>(x, h_constant, h_linear);
    default: return local_in<4>(x, h_constant, h_linear);
  }
}

double Sample::global_linear(const Point& x) const {
  return std::inner_product(x.begin(), x.begin() + d_, global_.begin() + 1, global_[0]);
}

}  // namespace lla::experiments
