// Straight lines through repeated measurements on log-log axes.
#pragma once

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
  double low, high;  // confidence interval from the scatter of the repetitions; value twice where nothing was repeated
  double intercept;
};

// Least squares of log(mean y) on log(x), or on log(x) and the correction. `intervals` slopes are reported together:
// their intervals hold all true values at once with 95 % confidence (Bonferroni).
Slope fit_exponent(const std::vector<Measured>& points, bool with_correction, int intervals = 1);

// Where the standard normal distribution exceeds x with this probability.
double normal_quantile(double upper_tail);

double mean(const std::vector<double>&);

}  // namespace lla::experiments
