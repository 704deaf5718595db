// `lla reproduce lemmas`: what the propositions are made of, measured with the library's own call. Squared bias of the
// local constant and the local linear estimate against the bandwidth, integrated over the ball and at its boundary, and
// variance against 1/(n h^d). The kernel is Gaussian, exp(-|u|^2 / (2 h^2)), the library's; the proofs take a compact
// one.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct LemmasRun {
  std::vector<int> dims{1, 2};
  std::vector<int64_t> sizes{20000, 200000};  // the bias is measured with the last, the variance with all
  int bandwidths = 6;                         // from 0.04 on, each sqrt(2) times the one before
  int repetitions = 6;
  uint64_t seed = 1;
  fs::path out;
  std::string command;
};

// False when it was stopped; the same command continues.
bool run(const LemmasRun&, const Progress&);

}  // namespace lla::experiments
