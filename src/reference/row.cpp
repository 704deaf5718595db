#include "reference/row.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace lla::reference {
namespace {

bool legal_ridge(Span ridge) {  // NaN fails the comparison; +infinity is legal
  return std::all_of(ridge.begin(), ridge.end(), [](double x) { return x >= 0; });
}

Span rows(const Vector& matrix, int64_t begin, int64_t end, int64_t width) {
  return Span(matrix).subspan(static_cast<size_t>(begin * width), static_cast<size_t>((end - begin) * width));
}

}  // namespace

bool all_finite(Span values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

double dot(Span a, Span b) {  // four sums: one alone waits for itself
  double sum[4] = {};
  size_t i = 0;
  for (; i + 4 <= a.size(); i += 4) {
    for (size_t j = 0; j < 4; ++j) sum[j] += a[i + j] * b[i + j];
  }
  for (; i < a.size(); ++i) sum[0] += a[i] * b[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

double centred_dot(Span key, Span mean, Span x) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (key[i] - mean[i]) * x[i];
  return sum;
}

Vector weighted_sum(Span p, Span values, size_t width) {
  Vector sum(width, 0.0);
  for (size_t j = 0; j < p.size(); ++j) {
    for (size_t d = 0; d < width; ++d) sum[d] += p[j] * values[j * width + d];
  }
  return sum;
}

Row make_row(const Head& head, int64_t index) {
  Row row;
  row.index = index;
  row.begin = std::max(head.mask.begin(index, head.length_q, head.length_k), std::min(head.first_key, head.length_k));
  row.end = std::max(row.begin, head.mask.end(index, head.length_q, head.length_k));
  row.q = rows(head.q, index, index + 1, head.dim);
  row.keys = rows(head.k, row.begin, row.end, head.dim);
  row.values = rows(head.v, row.begin, row.end, head.value_dim);
  if (!head.ridge.empty()) row.ridge = rows(head.ridge, index, index + 1, head.dim);
  if (!head.x.empty()) row.x = rows(head.x, index, index + 1, head.dim);
  row.empty = row.begin == row.end;
  row.bad = !row.empty && !(all_finite(row.q) && all_finite(row.x) && all_finite(row.keys) && all_finite(row.values) &&
                            legal_ridge(row.ridge));
  return row;
}

Statistics statistics(const Head& head, const Row& row) {
  const size_t dim = static_cast<size_t>(head.dim);
  const size_t count = static_cast<size_t>(row.count());
  Statistics result;
  Vector logits(count);  // log2 units
  double largest = -std::numeric_limits<double>::infinity();
  for (size_t j = 0; j < count; ++j) {
    logits[j] = head.scale * std::numbers::log2e * dot(row.q, row.keys.subspan(j * dim, dim));
    largest = std::max(largest, logits[j]);
  }
  result.max = std::ceil(largest);
  for (double logit : logits) result.omega += std::exp2(logit - result.max);
  for (double logit : logits) result.p.push_back(std::exp2(logit - result.max) / result.omega);
  result.mean_k = weighted_sum(result.p, row.keys, dim);
  result.mean_v = weighted_sum(result.p, row.values, static_cast<size_t>(head.value_dim));
  if (row.x.empty()) result.covariance = covariance(result.p, row.keys, result.mean_k);
  return result;
}

Vector covariance(Span p, Span keys, Span mean) {
  const size_t n = mean.size();
  Vector matrix(n * n, 0.0);
  Vector centred(n);
  for (size_t j = 0; j < p.size(); ++j) {
    if (p[j] == 0) continue;
    for (size_t d = 0; d < n; ++d) centred[d] = keys[j * n + d] - mean[d];
    for (size_t d = 0; d < n; ++d) {
      const double weighted = p[j] * centred[d];
      for (size_t e = 0; e <= d; ++e) matrix[d * n + e] += weighted * centred[e];
    }
  }
  for (size_t d = 0; d < n; ++d) {
    for (size_t e = d + 1; e < n; ++e) matrix[d * n + e] = matrix[e * n + d];
  }
  return matrix;
}

double rounding_noise(Span keys, size_t count) {
  double largest = 0;
  for (double key : keys) largest = std::max(largest, std::abs(key));
  const double deviation = static_cast<double>(count) * std::numeric_limits<double>::epsilon() * largest;
  return deviation * deviation;
}

Solution solve_row(const Row& row, const Statistics& statistics, Span b, const SolveOptions& options,
                   const core::StopRule& stop) {
  const double noise = rounding_noise(row.keys, statistics.p.size());
  return options.cg ? solve_cg(statistics.covariance, row.ridge, b, stop, options.max_iterations, noise, row.count())
                    : solve_direct(statistics.covariance, row.ridge, b, noise);
}

Solution solve_for_x(const Row& row, const Statistics& statistics, const SolveOptions& options) {
  Solution solution;
  if (!row.x.empty()) {
    solution.x.assign(row.x.begin(), row.x.end());
    return solution;
  }
  Vector b(row.q.begin(), row.q.end());
  for (size_t d = 0; d < b.size(); ++d) b[d] -= statistics.mean_k[d];
  return solve_row(row, statistics, b, options, options.stop);
}

}  // namespace lla::reference
