// `lla reproduce capacity`: the paper's retrieval error. n random pairs are stored, every one is asked for at its own
// key q = k_j, and the squared error of the answer is compared with |v|^2.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct CapacityRun {
  std::vector<int> dims{16, 32, 64, 128};
  std::vector<int> pairs;
  int repetitions = 16;
  double ridge = 0.1, mesa_ridge = 1;
  uint64_t seed = 1;
  fs::path out;
  std::string command;
};

// Relative errors E|answer - v|^2 / E|v|^2 of one set of pairs, keys and values (n, d).
struct Retrieval {
  double linear, linear_bias, linear_interference;  // of linear attention: whole, and its two terms apart
  double softmax, mesanet, lla;
};
// Linear attention takes the keys as they are; normalised ones have length 1 there (the bias then vanishes) and sqrt(d)
// for the others, whose scale and ridges are those of keys of that size.
Retrieval retrieve(int n, int d, bool normalised, double ridge, double mesa_ridge, std::vector<float> k,
                   const std::vector<float>& v);

// False when it was stopped; the same command continues.
bool run(const CapacityRun&, const Progress&);

}  // namespace lla::experiments
