// Where the tiles of a step of the key pass lie. Plain C++: tested without a GPU.
#pragma once

#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::sm90 {

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

}  // namespace lla::cuda::sm90
