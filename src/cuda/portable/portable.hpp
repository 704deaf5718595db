// CUDA for any GPU from compute capability 8.0 on: every dtype, shape, mask and ridge, plain arithmetic, no tensor
// cores. docs/cuda-portable.md tells how it works.
#pragma once

#include "plan/implementation.hpp"

namespace lla::cuda::portable {

extern const core::Implementation implementation;

}  // namespace lla::cuda::portable
