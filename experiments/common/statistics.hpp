// Straight lines through repeated measurements on log-log axes.
#pragma once

#include <cstdint>
#include <vector>

namespace lla::experiments {

// One abscissa, its repeated measurements, and the size of a known lower-order term there.
struct Measured {
  double x;
  std::vector<double> y;
  double correction = 0;
};

struct Slope {
  double value;
  double low, high;  // 95 % confidence interval: bootstrap over the repetitions
  double intercept;
};

// Least squares of log(mean y) on log(x), or on log(x) and the correction.
Slope fit_exponent(const std::vector<Measured>& points, bool with_correction, uint64_t seed);

double mean(const std::vector<double>&);

}  // namespace lla::experiments
