// `lla reproduce memory`: peak memory and time of naive LLA, blockwise LLA and softmax attention against the length.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct MemoryRun {
  int dim = 128;
  std::vector<int64_t> lengths;
  double ridge = 0.1;
  double limit_bytes = 0;  // the naive one is left out where it would need more
  uint64_t seed = 1;
  Device device = Device::cpu;
  fs::path out;
  std::string command;
};

// Half of what is available on this machine now.
double default_memory_limit();

// False when it was stopped; the same command continues.
bool run(const MemoryRun&, const Progress&);

}  // namespace lla::experiments
