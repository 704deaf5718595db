// What stands for src/cuda/common/dynamic_shared.cuh.
#pragma once

#include <cuda_runtime.h>

#define dynamic_bytes (::emulated::dynamic_shared())
#define dynamic_tiles (::emulated::dynamic_shared())
