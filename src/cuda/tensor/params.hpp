// Everything the forward kernel is told, by value.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/tensor/low_parts.hpp"
#include "cuda/tensor/schedule.hpp"
#include "cuda/tensor/workspace.hpp"

namespace lla::cuda::tensor {

// Rows addressed by (batch, position, head); strides in elements.
struct Rows {
  void* data;
  int64_t batch, position, head, channel;
  DType dtype;
  bool vectors;  // rows are contiguous and 16-byte aligned: taken in 16-byte pieces
};

struct Ridge {
  const float* data;
  int64_t batch, position, head, dim;  // strides, 0 where broadcast
  bool per_dim;
};

// A row's are counted in 15 bits.
inline constexpr int32_t kMostIterations = (1 << 15) - 1;

// A row is OK up to ten times the tolerance, or ten times 1e-3: closer than a few thousandths weights and U of eleven
// bits do not bring every row.
constexpr float most_told(double tolerance) { return static_cast<float>(10 * (tolerance > 1e-3 ? tolerance : 1e-3)); }

// Sections of the saved vector; null when not asked for.
struct Saved {
  float *max, *omega, *mean_k, *mean_v, *x;
};

// A dense f32 section of the saved vector, or one in its order: rows with `width` columns.
constexpr Rows saved_rows(const Shape& s, float* section, int64_t width) {
  const int64_t head = int64_t{s.packed ? s.total_q : s.seqlen_q} * width;
  return {section, s.packed ? 0 : s.heads_q * head, width, head, 1, DType::f32, true};
}

struct ForwardParams {
  Shape shape;
  int32_t dim, value_dim;
  int32_t heads_kv;
  Rows q, o, x;  // x: given
  Ridge ridge;
  Saved saved;
  core::RowOutputs info;
  const int32_t *cu_q, *cu_k;
  float scale_log2;  // |scale| log2(e); the sign goes into Q
  bool negative_scale;
  float tolerance_squared;
  float most_told;  // residual, roundings included, that a row may have and be OK
  // Of warpgroups whose rows see few keys (WarpgroupTiles).
  float few_keys_tolerance_squared;
  int32_t few_keys_iterations;  // at least
  int32_t two_part_passes;      // of the solve, from the first, with U in two parts
  int32_t max_iterations;
  float share_squared, least_squared;  // of the backward's solve: StepLimits
  LowParts low_parts;
  float sum_error;  // that Σ U / ω may have without the mean value
  // workspace
  Header* header;
  const HeadStatistics* heads;
  const float* key_shift;  // [head][padded dim]; looked up where HeadStatistics say kShifted
  const uint8_t *key_marks, *value_marks;
  float* scratch;
  int64_t scratch_stride;  // floats
  uint4* weights;
  int64_t weights_stride;  // uint4
  int64_t items;
};

}  // namespace lla::cuda::tensor
