// `lla reproduce iterations`: error of the output against a fixed number of iterations, by data kind, ridge and
// dimension.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct IterationsRun {
  std::vector<int> dims{64, 128};
  std::vector<int> positions{16, 64, 128, 256, 512, 1024};  // keys a row sees
  std::vector<double> ridges{1, 0.1, 0.01};
  int heads = 4;    // independent heads per kind
  fs::path layers;  // folder with NAME_q.npy, NAME_k.npy, NAME_v.npy (n, d) and NAME_ridge.npy (n) of trained layers
  uint64_t seed = 1;
  fs::path out;
  std::string command;
};

// False when it was stopped; the same command continues.
bool run(const IterationsRun&, const Progress&);

}  // namespace lla::experiments
