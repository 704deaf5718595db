// The fp16 operands over queries and the row constants that go with them: made before t is computed (q and G alone),
// and again when y is known. Where λ's gradient is wanted, made on the way.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/backward/records.hpp"
#include "cuda/sm90/forward/params.hpp"

namespace lla::cuda::sm90 {

struct OperandParams {
  Shape shape;
  const int32_t *cu_q, *cu_k;
  int32_t heads_kv, dim, value_dim, padded;
  float scale;  // of the logits
  Rows q, g;    // as the caller gave them
  Rows x, y;    // data null: taken as zero, and their operands are not written
  Rows mean_k, mean_v;
  const float *max, *omega;  // saved, per row
  const float *c, *rest;  // per row, of the solve: c, and the weight that is not the largest key's; null: c is 0, and the
                          // weight is bounded by what was saved
  const HeadStatistics* heads;
  HeadBounds* bounds;  // zeroed before
  float* head_scales;  // two per (batch, key head): see KeyPassParams
  uint16_t* operand[kQueryOperands];
  RowConstants* rows;
  float* row_scales;  // two per row: see RowPassParams
  // λ's gradient, -x y: per dimension, per row, or a partial sum per block of rows. Null: not wanted.
  float* dridge;
  int64_t dridge_batch, dridge_position, dridge_head, dridge_dim;  // strides; of partial sums all zero
  core::RidgeShape ridge;
  core::RowOutputs info;  // where x is given: there was no solve
};

Status run_operands(const OperandParams& params, cudaStream_t stream);

// Sums the blocks' partial sums of λ's gradient in a fixed order, to one number per head or one in all.
struct RidgeSumParams {
  const float* partial;
  float* dridge;
  int64_t head_stride;
  int64_t blocks_per_head;  // of a (batch, head)
  int32_t batch, heads_q;
  bool per_head;
};
Status run_ridge_sum(const RidgeSumParams& params, cudaStream_t stream);

}  // namespace lla::cuda::sm90
