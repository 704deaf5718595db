#include "support/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/text.hpp"

namespace lla::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double squared_difference(double got, double want) {
  if (std::isnan(got) && std::isnan(want)) return 0;
  if (got == want) return 0;
  const double difference = got - want;
  return std::isfinite(difference) ? difference * difference : kInfinity;
}

double squared(double want) { return std::isfinite(want) ? want * want : 0; }

// A zero reference leaves no scale: any difference is then infinite.
double ratio(double difference, double norm) {
  if (difference == 0) return 0;
  return norm > 0 ? std::sqrt(difference / norm) : kInfinity;
}

}  // namespace

std::string Error::text() const { return core::cat("norm ", norm, ", worst row ", row); }

Error compare(const Spec& spec, Side side, int64_t channels, const std::vector<double>& got,
              const std::vector<double>& want, double floor) {
  const int64_t length = side == Side::queries ? spec.length_q : spec.length_k;
  const int64_t heads = side == Side::queries ? spec.heads_q : spec.heads_kv;
  std::vector<int32_t> bounds = side == Side::queries ? spec.cu_q : spec.cu_k;
  if (!spec.packed()) bounds = {0, static_cast<int32_t>(length)};
  const auto expected = static_cast<size_t>(spec.batch * length * heads * channels);
  if (got.size() != expected || want.size() != expected) return {kInfinity, kInfinity};
  double squares = 0;
  for (double value : want) squares += squared(value);
  const double smallest_row =
      expected == 0 ? 0 : floor * floor * squares / static_cast<double>(spec.batch * length * heads);
  Error worst;
  for (int64_t b = 0; b < spec.batch; ++b) {
    for (size_t s = 0; s + 1 < bounds.size(); ++s) {
      for (int64_t h = 0; h < heads; ++h) {
        double difference = 0, norm = 0, worst_row = 0;
        for (int64_t i = bounds[s]; i < bounds[s + 1]; ++i) {
          double row = 0;
          const auto at = static_cast<size_t>(((b * length + i) * heads + h) * channels);
          for (size_t c = at; c < at + static_cast<size_t>(channels); ++c) {
            row += squared_difference(got[c], want[c]);
            norm += squared(want[c]);
          }
          difference += row;
          worst_row = std::max(worst_row, row);
        }
        const double rows = std::max(1, bounds[s + 1] - bounds[s]);
        norm = std::max(norm, rows * smallest_row);
        worst.norm = std::max(worst.norm, ratio(difference, norm));
        worst.row = std::max(worst.row, ratio(worst_row, norm / rows));
      }
    }
  }
  return worst;
}

double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return kInfinity;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += squared_difference(got[i], want[i]);
    norm += squared(want[i]);
  }
  return ratio(difference, norm);
}

bool all_finite(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

bool identical(const std::vector<double>& a, const std::vector<double>& b) {
  const auto same = [](double x, double y) {
    return x == y ? std::signbit(x) == std::signbit(y) : std::isnan(x) && std::isnan(y);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

std::vector<double> row_of(const Spec& spec, Side side, int64_t channels, const std::vector<double>& tensor, int64_t b,
                           int64_t i, int64_t h) {
  const int64_t length = side == Side::queries ? spec.length_q : spec.length_k;
  const int64_t heads = side == Side::queries ? spec.heads_q : spec.heads_kv;
  const auto first = tensor.begin() + ((b * length + i) * heads + h) * channels;
  return {first, first + channels};
}

}  // namespace lla::test
