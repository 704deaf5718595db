// `lla reproduce rates`: integrated squared error against the number of observations, for the paper's Propositions 1
// and 2.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct RatesRun {
  std::vector<int> dims{1, 2, 3, 4};
  std::vector<int64_t> sizes;  // numbers of observations
  int repetitions = 24;
  double noise = 0.2;
  double bandwidth = 1;  // h = bandwidth * n^(-1/(d+3)), or n^(-1/(d+4)) for local linear
  uint64_t seed = 1;
  fs::path out;
  std::string command;
};

// 10^4 to 10^6 in steps of 10^(1/steps_per_decade): from there on the boundary layer is thin enough up to d = 4.
std::vector<int64_t> rate_sizes(int steps_per_decade);

// False when it was stopped; the same command continues.
bool run(const RatesRun&, const Progress&);

// Exponent of the squared error in n that the propositions give (0 for the global fit).
double theoretical_rate(const std::string& estimator, int d);

}  // namespace lla::experiments
