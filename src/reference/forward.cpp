// o = mean_v + sum of p_j ((k_j - mean_k).x) v_j, row by row.
#include <algorithm>
#include <limits>

#include "reference/row.hpp"

namespace lla::reference {
namespace {

void put(Vector& matrix, int64_t row, Span values) {
  std::copy(values.begin(), values.end(), matrix.begin() + row * static_cast<int64_t>(values.size()));
}

}  // namespace

ForwardResult forward(const Head& head, const SolveOptions& options) {
  const size_t lq = static_cast<size_t>(head.length_q);
  const size_t dim = static_cast<size_t>(head.dim);
  const size_t value_dim = static_cast<size_t>(head.value_dim);
  ForwardResult result;
  result.o.assign(lq * value_dim, 0.0);
  result.max.assign(lq, 0.0);
  result.omega.assign(lq, 0.0);
  result.mean_k.assign(lq * dim, 0.0);
  result.mean_v.assign(lq * value_dim, 0.0);
  result.x.assign(lq * dim, 0.0);
  result.solution.resize(lq);
  for (int64_t i = 0; i < head.length_q; ++i) {
    const Row row = make_row(head, i);
    Solution& solution = result.solution[static_cast<size_t>(i)];
    if (row.empty) continue;
    if (row.bad) {
      constexpr double nan = std::numeric_limits<double>::quiet_NaN();
      solution.status = LLA_ROW_NAN;
      result.omega[static_cast<size_t>(i)] = nan;
      put(result.o, i, Vector(value_dim, nan));
      put(result.mean_k, i, Vector(dim, nan));
      put(result.mean_v, i, Vector(value_dim, nan));
      put(result.x, i, Vector(dim, nan));
      continue;
    }
    const Statistics s = statistics(head, row);
    solution = solve_for_x(row, s, options);
    const Vector& x = solution.x;
    Vector o = s.mean_v;
    for (size_t j = 0; j < s.p.size(); ++j) {
      const double e = centred_dot(row.keys.subspan(j * dim, dim), s.mean_k, x);
      for (size_t c = 0; c < value_dim; ++c) o[c] += s.p[j] * e * (row.values[j * value_dim + c] - s.mean_v[c]);
    }
    result.max[static_cast<size_t>(i)] = s.max;
    result.omega[static_cast<size_t>(i)] = s.omega;
    put(result.o, i, o);
    put(result.mean_k, i, s.mean_k);
    put(result.mean_v, i, s.mean_v);
    put(result.x, i, x);
  }
  return result;
}

}  // namespace lla::reference
