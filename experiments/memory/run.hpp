// `lla reproduce memory`: peak memory and time of naive LLA, blockwise LLA and softmax attention against the length;
// with `decode` those of one step of generation, above the cache.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace lla::experiments {

struct MemoryRun {
  std::vector<int> dims{128};
  std::vector<int64_t> batches{1};         // heads at once; above 1 on a GPU or decoding only
  std::vector<std::string> dtypes{"f32"};  // f32, bf16; bf16 on a GPU only
  std::vector<int64_t> lengths;
  bool decode = false;  // one query per head over a cache; else as many queries as keys
  double ridge = 0.1;
  double limit_bytes = 0;      // on the CPU: the naive one is left out where it would need more
  double limit_seconds = 0.2;  // on a GPU: longer calls are not made, only their memory is taken
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
