// What the CUDA runtime says of a device. No CUDA headers here: the planner includes this.
#pragma once

#include "plan/machine.hpp"

namespace lla::cuda {

// The oldest compute capability any kernel of this build runs on.
inline constexpr int kOldestArch = 80;

// Never fails: a missing driver, no device or one too old gives present = false and the reason.
core::CudaDevice probe(int device_index);

}  // namespace lla::cuda
