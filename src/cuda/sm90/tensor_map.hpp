// Descriptors for the copy engine.
#pragma once

#include <cuda.h>

#include "core/problem.hpp"

namespace lla::cuda::sm90 {

// A row-major fp16 matrix fetched in boxes of `box_rows` x 64, swizzled by 128 bytes; what lies beyond the matrix reads
// as 0.
Status make_tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t columns, int box_rows);

// Records of 32 bytes fetched in boxes of `box_rows`, swizzled by 32 bytes: in every other four of a box the two halves
// are swapped.
Status make_record_map(CUtensorMap& map, const void* data, int64_t records, int box_rows);

// As the first for a key-value cache (page, slot, head, channel), whatever its strides, in boxes of one head's 64
// channels and `box_slots` slots. The strides are positive multiples of 16 bytes, channels dense.
Status make_cache_map(CUtensorMap& map, const core::Operand& cache, const int64_t (&sizes)[4], int box_slots);

}  // namespace lla::cuda::sm90
