// dk and dv: one block per 128 keys of a head, running over the queries (of all query heads of the group) that see
// them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::sm90 {

inline constexpr int kKeyBlock = 128;  // keys of a block: two warpgroups of 64
inline constexpr int kQueryTile = 64;  // queries of a step

// A step's tiles come two a slot of the ring, slots in this order; the low parts only where the step has any, and y's
// only where there was a solve. Who brings a slot and who reads a tile both ask here where it is.
enum KeyPassSlot : int { kLowSlot, kScoreSlot, kGradientSlot, kKeyPassSlots };
constexpr QueryOperand tile_of_slot(int slot, int half) {
  constexpr QueryOperand kTiles[kKeyPassSlots][2] = {{kOpXLow, kOpYLow}, {kOpQ, kOpXHigh}, {kOpG, kOpYHigh}};
  return kTiles[slot][half];
}

struct TilePlace {
  int slot = -1, half = -1;
};
constexpr TilePlace tile_place(QueryOperand operand) {
  for (int slot = 0; slot < kKeyPassSlots; ++slot) {
    for (int half = 0; half < 2; ++half) {
      if (tile_of_slot(slot, half) == operand) return {slot, half};
    }
  }
  return {};
}

struct KeyPassParams {
  CUtensorMap keys, values;  // boxes of 64 rows x 64 columns
  CUtensorMap queries[kQueryOperands];
  const uint32_t* low;  // per block of rows: whether it has low parts
  Shape shape;
  const int32_t *cu_q, *cu_k;
  int32_t heads_kv;
  int32_t dim, value_dim;
  int32_t heads_together;  // (batch, key head) pairs whose blocks are launched side by side
  const RowConstants* rows;
  const int32_t* head_exponents;  // per (batch, key head): of dk and dv per unit of accumulator
  Rows dk, dv;                    // data null: not wanted
};

template <int kDim, bool kSolve>
Status launch_key_pass(const KeyPassParams& params, cudaStream_t stream);

}  // namespace lla::cuda::sm90
