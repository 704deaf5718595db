// The fp16 operands over queries and the row constants that go with them, from the rows' sizes. Where λ's gradient is
// wanted, it is made on the way.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::tensor {

struct OperandParams {
  Shape shape;
  const int32_t *cu_q, *cu_k;
  int32_t heads_kv, dim, value_dim, padded;
  float scale;  // of the logits
  Rows q, g;    // as the caller gave them
  Rows x, y;    // y, in units of the row: data null where x is given
  Rows mean_k, mean_v;
  const float *max, *omega;  // saved, per row
  RowSizes* sizes;
  const HeadStatistics* heads;
  const float* key_shift;             // [key head][padded]; where HeadStatistics say kShifted
  HeadBounds* bounds;                 // zeroed before
  int32_t* head_exponents;            // two per (batch, key head): see KeyPassParams
  uint16_t* operand[kQueryOperands];  // low parts: written only where `low` says so
  uint32_t* low;                      // per block of rows: whether a row of it has low parts
  RowConstants* rows;
  RowUnits* units;
  // λ's gradient, -x y: per dimension or row, or a partial sum per block of rows. Null: not wanted.
  float* dridge;
  int64_t dridge_batch, dridge_position, dridge_head, dridge_dim;  // strides
  double* ridge_sums;
  core::RidgeShape ridge;
  core::RowOutputs info;  // where x is given: there was no solve
};

// Sizes of the rows and bounds of the heads where x is given; else the solve has made them.
Status run_sizes(const OperandParams& params, cudaStream_t stream);
Status run_operands(const OperandParams& params, cudaStream_t stream);

// Sums the blocks' partial sums of λ's gradient in a fixed order, to one number per head or one in all.
struct RidgeSumParams {
  const double* partial;
  float* dridge;
  int64_t head_stride;
  int64_t blocks_per_head;  // of a (batch, head)
  int32_t batch, heads_q;
  bool per_head;
};
Status run_ridge_sum(const RidgeSumParams& params, cudaStream_t stream);

}  // namespace lla::cuda::tensor
