// `lla reproduce solver`: iterations of conjugate gradients and error of the output, by position, ridge, data kind,
// arithmetic and form, against the fp64 direct solve.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct SolverRun {
  int dim = 64;
  std::vector<int> positions{16, 64, 128, 256, 512, 1024, 2048};  // keys a row sees
  std::vector<double> ridges{1, 0.1, 0.01, 1e-3, 1e-4, 1e-5};
  int rows = 4;  // independent heads per case
  std::vector<double> tolerances{1e-3, 1e-6};
  uint64_t seed = 1;
  fs::path out;
  std::string command;
};

// False when it was stopped; the same command continues.
bool run(const SolverRun&, const Progress&);

}  // namespace lla::experiments
