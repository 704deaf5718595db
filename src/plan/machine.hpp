// What the planner may know of a machine. A plain value, so that any machine's plan can be made and tested on any
// other.
#pragma once

#include <cstdint>
#include <string>

namespace lla::core {

struct CudaDevice {
  bool present = false;
  std::string absent_reason;
  std::string name;
  int arch = 0;  // 90 for compute capability 9.0
  int multiprocessors = 0;
  int64_t shared_memory_per_block = 0;  // opt-in maximum
  int64_t l2_bytes = 0;
};

struct Machine {
  int threads = 1;
  size_t workspace_bytes = SIZE_MAX;  // what a call has brought along; no limit where none is known yet
  std::string simd = "none";
  CudaDevice cuda;
};

// This machine without a look for CUDA: a call on the CPU never touches a driver.
Machine this_cpu();

// This machine with one CUDA device; probing CUDA never fails, it gives a reason instead.
Machine this_machine(int cuda_device_index);

// The planner's stand-in for an H200, for tests and for planning ahead.
Machine h200();

}  // namespace lla::core
