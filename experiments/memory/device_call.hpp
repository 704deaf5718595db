// One measurement on a GPU: a method's working set is taken from the device, the call is made, and the device is asked
// what is left.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/device.hpp"
#include "memory/naive.hpp"

namespace lla::experiments {

struct DeviceCase {
  std::string method;  // naive, blockwise, softmax
  bool bf16;
  int64_t batch, n, d;
  double ridge;
  uint64_t seed;
  bool decode = false;  // one query per sequence over a cache of n keys; else as many queries as keys
  int64_t queries() const { return decode ? 1 : n; }
  NaiveSizes naive_sizes() const { return {batch, queries(), n, d}; }
};

struct DeviceCost {
  bool fits = false;  // inputs, output and working set could be allocated
  bool ran = false;
  double seconds = 0;
  double peak_bytes = 0;    // above inputs (or cache) and output: measured where it fits, else what it asks for
  std::vector<float> head;  // the output's first rows, where it ran
};

// run: make the call, twice, and time the second one.
DeviceCost measure_on_device(DeviceMemory&, const DeviceCase&, bool run);

}  // namespace lla::experiments
