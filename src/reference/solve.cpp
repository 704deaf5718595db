// The two solvers of A x = b, A = covariance + diag(ridge). A dimension with an infinite ridge is taken out: x is 0
// there.
#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/row.hpp"

namespace lla::reference {
namespace {

// A step along a direction of relative curvature c multiplies the rounding errors of A by 1/c: below this the output
// would lose more than the last third of its digits to a direction it should hardly see.
constexpr double kFlat = 4e-11;  // epsilon^(2/3)

// A u, with the rows and columns of removed dimensions left out.
Vector apply(Span covariance, Span ridge, Span u) {
  const size_t n = u.size();
  Vector result(n, 0.0);
  for (size_t i = 0; i < n; ++i) {
    if (std::isinf(ridge[i])) continue;
    result[i] = dot(covariance.subspan(i * n, n), u) + ridge[i] * u[i];
  }
  return result;
}

Vector without_removed(Span ridge, Span b) {
  Vector result(b.begin(), b.end());
  for (size_t i = 0; i < b.size(); ++i) {
    if (std::isinf(ridge[i])) result[i] = 0;
  }
  return result;
}

}  // namespace

Solution solve_direct(Span covariance, Span ridge, Span b, double noise) {
  const size_t n = b.size();
  Solution solution;
  solution.x = without_removed(ridge, b);
  Vector lower(n * n, 0.0);
  std::vector<bool> skipped(n, false);
  for (size_t j = 0; j < n; ++j) {
    if (std::isinf(ridge[j])) {
      skipped[j] = true;
      continue;
    }
    const Span row_j = Span(lower).subspan(j * n, j);
    const double diagonal = covariance[j * n + j] + ridge[j];
    const double pivot = diagonal - dot(row_j, row_j);
    if (!(pivot > std::max(noise, kFlat * diagonal))) {
      skipped[j] = true;
      solution.status = LLA_ROW_BREAKDOWN;
      continue;
    }
    lower[j * n + j] = std::sqrt(pivot);
    for (size_t i = j + 1; i < n; ++i) {
      if (std::isinf(ridge[i])) continue;
      const double rest = covariance[i * n + j] - dot(Span(lower).subspan(i * n, j), row_j);
      lower[i * n + j] = rest / lower[j * n + j];
    }
  }
  Vector& x = solution.x;  // forward, then backward substitution in place
  for (size_t i = 0; i < n; ++i) {
    x[i] = skipped[i] ? 0.0 : (x[i] - dot(Span(lower).subspan(i * n, i), Span(x).first(i))) / lower[i * n + i];
  }
  for (size_t i = n; i-- > 0;) {
    if (skipped[i]) continue;
    double sum = x[i];
    for (size_t j = i + 1; j < n; ++j) sum -= lower[j * n + i] * x[j];
    x[i] = sum / lower[i * n + i];
  }
  return solution;
}

Solution solve_cg(Span covariance, Span ridge, Span b, core::StopRule stop, int max_iterations, double noise,
                  int64_t keys) {
  const size_t n = b.size();
  Solution solution;
  solution.x.assign(n, 0.0);
  Vector r = without_removed(ridge, b);
  Vector direction = r;
  double rr = dot(r, r);
  const double norm_b = std::sqrt(rr);
  Vector best = solution.x;
  double steepest = 0;  // largest curvature per squared length so far
  solution.iterations = 0;
  solution.residual = norm_b > 0 ? 1 : 0;
  solution.trace.push_back(solution.residual);
  const auto limit = [&] {
    core::SolveSizes sizes{.rhs_squares = norm_b * norm_b,
                           .smallest_ridge = *std::min_element(ridge.begin(), ridge.end())};
    for (size_t i = 0; i < n; ++i) {
      if (std::isinf(ridge[i])) continue;
      sizes.rhs_product += solution.x[i] * b[i];
      sizes.ridge_product += ridge[i] * solution.x[i] * solution.x[i];
      sizes.ridge_squares += std::pow(ridge[i] * solution.x[i], 2);
    }
    return stop.limit(sizes, keys);
  };
  while (rr > limit()) {
    if (solution.iterations == max_iterations) {
      solution.status = LLA_ROW_MAX_ITERATIONS;
      break;
    }
    const Vector a_direction = apply(covariance, ridge, direction);
    const double curvature = dot(direction, a_direction);
    const double length = dot(direction, direction);
    steepest = std::max(steepest, curvature / length);
    // Flat or falling: the step would be rounding noise blown up. Where b is out of A's reach the steps before this one
    // went ever further for nothing, so the x of the smallest residual stands.
    if (!(curvature > std::max(noise, kFlat * steepest) * length)) {
      solution.status = LLA_ROW_BREAKDOWN;
      solution.x = best;
      solution.residual = *std::min_element(solution.trace.begin(), solution.trace.end());
      break;
    }
    const double stride = rr / curvature;
    for (size_t i = 0; i < n; ++i) {
      solution.x[i] += stride * direction[i];
      r[i] -= stride * a_direction[i];
    }
    const double rr_next = dot(r, r);
    for (size_t i = 0; i < n; ++i) direction[i] = r[i] + rr_next / rr * direction[i];
    rr = rr_next;
    ++solution.iterations;
    solution.residual = std::sqrt(rr) / norm_b;
    if (solution.residual < *std::min_element(solution.trace.begin(), solution.trace.end())) best = solution.x;
    solution.trace.push_back(solution.residual);
  }
  return solution;
}

}  // namespace lla::reference
