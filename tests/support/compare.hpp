// The error of a result against a reference: per (sequence, head) relative norms, and the worst row.
#pragma once

#include <string>
#include <vector>

#include "support/problem.hpp"

namespace lla::test {

struct Error {
  double norm = 0;  // worst (sequence, head): |got - want| / |want| over its rows
  double row = 0;   // worst row: |got - want| over the rms row norm of its (sequence, head)

  std::string text() const;
};

// Which rows belong together: the sequences of the queries or of the keys.
enum class Side { queries, keys };

// Of a (batch, length, heads, channels) tensor of the problem, or its packed form. Infinite where one is finite and the
// other not; elements that are NaN in both count as equal.
Error compare(const Spec& spec, Side side, int64_t channels, const std::vector<double>& got,
              const std::vector<double>& want, double floor = 0);
// As one vector: |got - want| / |want|.
double relative_error(const std::vector<double>& got, const std::vector<double>& want);
bool all_finite(const std::vector<double>& values);
// Bit for bit, NaN equal to NaN.
bool identical(const std::vector<double>& a, const std::vector<double>& b);

// One row of a (.., length, heads, channels) tensor.
std::vector<double> row_of(const Spec& spec, Side side, int64_t channels, const std::vector<double>& tensor, int64_t b,
                           int64_t i, int64_t h);

}  // namespace lla::test
