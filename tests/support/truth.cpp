#include "support/truth.hpp"

#include <cmath>

#include "reference/row.hpp"
#include "support/run.hpp"

namespace lla::test {
namespace {

// (length, width) of one head of a (batch, length, heads, width) tensor.
std::vector<double> head_of(const std::vector<double>& tensor, int64_t b, int64_t h, int64_t length, int64_t heads,
                            int64_t width) {
  std::vector<double> rows;
  for (int64_t i = 0; i < length; ++i) {
    const auto at = tensor.begin() + ((b * length + i) * heads + h) * width;
    rows.insert(rows.end(), at, at + width);
  }
  return rows;
}

double ridge_of(const Spec& s, const Inputs& inputs, int64_t b, int64_t h, int64_t i, int64_t d) {
  const int64_t row = (b * s.length_q + i) * s.heads_q + h;
  switch (s.ridge) {
    case RidgeShape::head: return inputs.ridge[static_cast<size_t>(h)];
    case RidgeShape::token: return inputs.ridge[static_cast<size_t>(row)];
    case RidgeShape::dimension: return inputs.ridge[static_cast<size_t>(row * s.dim + d)];
    default: return inputs.ridge[0];
  }
}

}  // namespace

std::vector<double> saved_x(const Spec& spec, const std::vector<double>& saved) {
  const auto first = saved.begin() + saved_layout(spec).saved_x;
  return {first, first + spec.rows() * spec.dim};
}

std::vector<double> true_residuals(const Spec& s, const Inputs& inputs, const std::vector<double>& saved) {
  const std::vector<double> x = saved_x(s, saved);
  const auto dim = static_cast<size_t>(s.dim);
  std::vector<double> residuals;
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads_q; ++h) {
      reference::Head head;
      head.length_q = s.length_q;
      head.length_k = s.length_k;
      head.dim = s.dim;
      head.value_dim = s.value_dim;
      head.q = head_of(inputs.q, b, h, s.length_q, s.heads_q, s.dim);
      head.k = head_of(inputs.k, b, h * s.heads_kv / s.heads_q, s.length_k, s.heads_kv, s.dim);
      head.v = head_of(inputs.v, b, h * s.heads_kv / s.heads_q, s.length_k, s.heads_kv, s.value_dim);
      for (int64_t i = 0; i < s.length_q; ++i) {
        for (int64_t d = 0; d < s.dim; ++d) head.ridge.push_back(ridge_of(s, inputs, b, h, i, d));
      }
      head.scale = std::isnan(s.options.scale) ? 1 / std::sqrt(static_cast<double>(s.dim)) : s.options.scale;
      head.mask = {s.options.window_left, s.options.causal ? 0 : s.options.window_right};
      for (int64_t i = 0; i < s.length_q; ++i) {
        const reference::Row row = reference::make_row(head, i);
        const size_t at = residuals.size() * dim;
        residuals.push_back(0);
        if (row.empty || row.bad) continue;
        const reference::Statistics statistics = reference::statistics(head, row);
        const std::span<const double> solution(x.data() + at, dim);
        double squares = 0, norm = 0;
        for (size_t d = 0; d < dim; ++d) {
          if (std::isinf(row.ridge[d])) continue;
          const double rhs = row.q[d] - statistics.mean_k[d];
          const auto a_row = std::span<const double>(statistics.covariance).subspan(d * dim, dim);
          squares += std::pow(rhs - row.ridge[d] * solution[d] - reference::dot(a_row, solution), 2);
          norm += rhs * rhs;
        }
        residuals.back() = norm > 0 ? std::sqrt(squares / norm) : 0;
      }
    }
  }
  return residuals;
}

}  // namespace lla::test
