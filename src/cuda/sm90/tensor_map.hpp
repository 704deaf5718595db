// Descriptors for the copy engine.
#pragma once

#include <cuda.h>

#include "lla/lla.hpp"

namespace lla::cuda::sm90 {

// A row-major fp16 matrix fetched in boxes of `box_rows` x 64, swizzled by 128 bytes; what lies beyond the matrix reads as 0.
Status make_tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int box_rows);

}  // namespace lla::cuda::sm90
