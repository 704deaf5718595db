// dq, whose sums run over keys; where x is given also dx = t = sum p (gamma - tau) k, in the same pass.
// One block per 128 queries of a head, running over the keys they see.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::sm90 {

struct RowPassParams {
  CUtensorMap keys, values;  // boxes of 64 rows x 64 columns
  CUtensorMap queries[kQueryOperands];
  const uint32_t* low;  // per block of rows: whether it has low parts
  Shape shape;
  const int32_t *cu_q, *cu_k;
  int32_t heads_kv, dim;
  const uint16_t* q;  // the fp16 operand, for the registers
  RowConstants* rows;
  const RowUnits* units;
  const HeadStatistics* heads;
  const float* key_shift;  // [key head][padded]; where HeadStatistics say kShifted
  const float* mean_k;     // saved, [row][dim]
  const float* y;          // [row][padded], in units of the row
  Rows dq, dx;             // data null: not wanted
};

// kSolve: x and y come from solves. Otherwise x is given, y is zero, and c is found here. Either way b0 and c of the
// row constants are left such that P b and dS, as the kernels compute them, sum to zero.
template <int kDim, bool kSolve>
Status launch_row_pass(const RowPassParams& params, cudaStream_t stream);

}  // namespace lla::cuda::sm90
