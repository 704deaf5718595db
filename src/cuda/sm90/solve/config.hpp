// Tile sizes of the forward kernel, with the reason beside each.
#pragma once

#include <cstdint>

#include "cuda/tensor/schedule.hpp"

namespace lla::cuda::sm90 {

// Keys per tile. Registers of a consumer thread in a recomputing CG pass: scores and E (keys / 2 each), the accumulator
// (dim / 2), the direction and packed U (dim / 4, keys / 4). D = 128: 196 with 80 keys, of 240. D = 64: 208 with 128.
constexpr int tile_keys(int dim) { return dim == 128 ? 80 : 128; }

template <int kDim_, bool kCached_>
struct ForwardConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kCached = kCached_;  // weights kept in the workspace instead of recomputed in every pass
  static constexpr int kKeys = tile_keys(kDim);
  static constexpr int kWarpgroups = 2;  // consumer warpgroups, 64 queries each
  // Each has an item and a stream of tiles of its own: one multiplies while the other works on its vectors. (To share
  // them halves what is read of the keys, and costs a tenth of the time.)
  static constexpr int kItemRows = kWarpgroupRows;
  // Shared memory is full. D = 128: 2 x 3 x 20 KiB of tiles, 64 of residuals, and 2 x 2 x 10 of weights or 32 of
  // queries. D = 64: 2 x 4 x 16 of tiles, 32 of residuals, and 2 x 2 x 16 of weights or 16 of queries.
  static constexpr int kStages = kDim == 128 ? 3 : 4;    // of a stream
  static constexpr int kWeightStages = kCached ? 2 : 0;  // of a warpgroup
  // Weights are asked for before their tile's keys: their slot is free earlier. With more tiles than weights it is
  // worse.
  static constexpr bool kWeightsFirst = kStages == kWeightStages + 1;
  static constexpr int kTileElements = kKeys * kDim;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  // Of the 168 a thread starts with. Recomputing takes all a consumer can have; with cached weights there are some for
  // the producers, whose addresses are spilled otherwise.
  static constexpr int kProducerRegisters = kCached ? 40 : 24, kConsumerRegisters = kCached ? 232 : 240;
  // Tiles beyond 32 times this are never skipped. Cached weights of more would be gigabytes.
  static constexpr int kLiveWords = kCached ? 16 : 64;
  // Row sums of U (and of W) come out of the products with keys or values, which columns of ones make eight wider. At D
  // = 128 there is no room for ones behind each tile, and other ways were no faster (docs).
  static constexpr bool kOnes = kDim == 64;
};

constexpr int64_t cached_weights_bytes(const Shape& s, int dim) {
  return most_tiles(s, tile_keys(dim)) * kBlockRows * tile_keys(dim) * 2;
}

}  // namespace lla::cuda::sm90
