// `lla reproduce interpolation`: regression in one dimension, drawn as curves. The paper's front figure (global linear,
// local constant, local linear), and the walk from the linear end of LLA (scale 0) to its softmax end (infinite ridge).
// Every curve is a call of the library.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct InterpolationRun {
  int observations = 80;
  double noise = 0.15;
  double bandwidth = 0.15;  // of the front figure and of the walk's end; weights exp(-(x - x')^2 / (2 bandwidth^2))
  uint64_t seed = 1;
  fs::path out;
  std::string command;
};

// The function on [-1, 1]: curved, and steep at its left end.
double front_target(double x);

// Fits at the points of `at` by the library. bandwidth = infinity: equal weights, one affine fit for all of them.
struct Fitted {
  std::vector<double> local_linear, local_constant;
};
Fitted fit(const std::vector<double>& x, const std::vector<double>& y, const std::vector<double>& at, double bandwidth,
           double ridge);

bool run(const InterpolationRun&, const Progress&);

}  // namespace lla::experiments
