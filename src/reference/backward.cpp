// The gradient with one solve per row (docs/math.md). Nothing is taken from the forward pass: every row is worked out
// again.
#include <algorithm>
#include <limits>

#include "reference/row.hpp"

namespace lla::reference {
namespace {

// NaN into everything the row contributes to.
void poison(const Head& head, const Row& row, BackwardResult& result) {
  const auto fill = [nan = std::numeric_limits<double>::quiet_NaN()](Vector& matrix, int64_t begin, int64_t end,
                                                                     int64_t width) {
    if (!matrix.empty()) std::fill(matrix.begin() + begin * width, matrix.begin() + end * width, nan);
  };
  fill(result.dq, row.index, row.index + 1, head.dim);
  fill(result.dridge, row.index, row.index + 1, head.dim);
  fill(result.dx, row.index, row.index + 1, head.dim);
  fill(result.dk, row.begin, row.end, head.dim);
  fill(result.dv, row.begin, row.end, head.value_dim);
}

void add_row(const Head& head, const Row& row, Span g, const SolveOptions& options, BackwardResult& result) {
  const size_t dim = static_cast<size_t>(head.dim);
  const size_t value_dim = static_cast<size_t>(head.value_dim);
  const size_t at = static_cast<size_t>(row.index);
  const size_t first = static_cast<size_t>(row.begin);
  const bool given = !row.x.empty();
  const Statistics s = statistics(head, row);
  const size_t count = s.p.size();
  const Vector x = solve_for_x(row, s, options).x;

  const auto key = [&](size_t j) { return row.keys.subspan(j * dim, dim); };
  Vector centred_gamma(count);  // g.(v_j - mean_v)
  for (size_t j = 0; j < count; ++j)
    centred_gamma[j] = centred_dot(row.values.subspan(j * value_dim, value_dim), s.mean_v, g);
  Vector t(dim, 0.0);  // dL/dx
  for (size_t j = 0; j < count; ++j) {
    for (size_t d = 0; d < dim; ++d) t[d] += s.p[j] * centred_gamma[j] * (key(j)[d] - s.mean_k[d]);
  }
  Vector y(dim, 0.0);
  if (!given) {
    result.solution[at] = solve_row(row, s, t, options, options.backward_stop);
    y = result.solution[at].x;
  }

  // E and b have weighted sums of 0. Where one key has all the weight but some 1e-16 of it, the means are that key and
  // its own E and b come out as 0 instead of minus what the others have; taking the sums off puts that right.
  Vector e(count), b(count);
  double e_sum = 0, b_sum = 0;
  for (size_t j = 0; j < count; ++j) {
    e[j] = centred_dot(key(j), s.mean_k, x);
    b[j] = centred_gamma[j] - centred_dot(key(j), s.mean_k, y);
    e_sum += s.p[j] * e[j];
    b_sum += s.p[j] * b[j];
  }
  Vector a(count);
  double c = 0;
  for (size_t j = 0; j < count; ++j) {
    e[j] -= e_sum;
    b[j] -= b_sum;
    a[j] = 1 + e[j];
    c += s.p[j] * e[j] * b[j];
  }
  for (size_t j = 0; j < count; ++j) {
    const double p = s.p[j];
    const double ds = head.scale * p * (a[j] * b[j] - c);
    for (size_t d = 0; d < dim; ++d) {
      result.dq[at * dim + d] += ds * (key(j)[d] - s.mean_k[d]);
      result.dk[(first + j) * dim + d] += ds * row.q[d] + p * b[j] * x[d] - p * a[j] * y[d];
    }
    for (size_t e = 0; e < value_dim; ++e) result.dv[(first + j) * value_dim + e] += p * a[j] * g[e];
  }
  for (size_t d = 0; d < dim; ++d) {
    result.dq[at * dim + d] += y[d];
    if (given) {
      result.dx[at * dim + d] = t[d];
    } else {
      result.dridge[at * dim + d] = -x[d] * y[d];
    }
  }
}

}  // namespace

BackwardResult backward(const Head& head, Span grad_o, const SolveOptions& options) {
  BackwardResult result;
  result.dq.assign(head.q.size(), 0.0);
  result.dk.assign(head.k.size(), 0.0);
  result.dv.assign(head.v.size(), 0.0);
  result.dridge.assign(head.ridge.size(), 0.0);
  result.dx.assign(head.x.size(), 0.0);
  result.solution.resize(static_cast<size_t>(head.length_q));
  for (int64_t i = 0; i < head.length_q; ++i) {
    const Row row = make_row(head, i);
    if (row.empty) continue;
    const size_t width = static_cast<size_t>(head.value_dim);
    const Span g = grad_o.subspan(static_cast<size_t>(i) * width, width);
    if (row.bad || !all_finite(g)) {
      result.solution[static_cast<size_t>(i)].status = LLA_ROW_NAN;
      poison(head, row, result);
    } else {
      add_row(head, row, g, options, result);
    }
  }
  return result;
}

}  // namespace lla::reference
