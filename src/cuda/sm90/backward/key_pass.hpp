// dk and dv: one block per 128 keys of a head, running over the queries (of all query heads of the group) that see
// them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/sm90/backward/key_pass_slots.hpp"
#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::sm90 {

inline constexpr int kKeyBlock = 128;  // keys of a block: two warpgroups of 64
inline constexpr int kQueryTile = 64;  // queries of a step

struct KeyPassParams {
  CUtensorMap keys, values;  // boxes of 64 rows x 64 columns
  CUtensorMap queries[kQueryOperands];
  CUtensorMap constants;  // of rows: boxes of 64 RowConstants, swizzled by 32 bytes
  const uint32_t* low;    // per block of rows: whether it has low parts
  Shape shape;
  const int32_t *cu_q, *cu_k;
  int32_t heads_kv;
  int32_t dim, value_dim;
  int32_t heads_together;         // (batch, key head) pairs whose blocks are launched side by side
  const int32_t* head_exponents;  // per (batch, key head): of dk and dv per unit of accumulator
  Rows dk, dv;                    // data null: not wanted
};

template <int kDim, bool kSolve>
Status launch_key_pass(const KeyPassParams& params, cudaStream_t stream);

}  // namespace lla::cuda::sm90
