// Tile sizes of the kernel for a given x, with the reason beside each.
#pragma once

#include "cuda/sm90/schedule.hpp"

namespace lla::cuda::sm90 {

// Keys per tile. Registers of a consumer thread: two accumulators (dim / 2 each), one block for the scores and then for E
// (keys / 2), packed W and U (keys / 4 each). D = 128: 80 keys take 208 of 240. D = 64: 128 keys take 192.
constexpr int parallax_tile_keys(int dim) { return dim == 128 ? 80 : 128; }

// Shared memory holds Q, x (two parts if split) and as many tiles as fit, a power of two (4 x 20 or 8 x 16 KiB).
constexpr int parallax_tile_stages(int dim) { return dim == 128 ? 4 : 8; }

template <int kDim_, bool kSplit_>
struct ParallaxConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kSplit = kSplit_;  // x as high and low part: f32. A 16-bit x fits fp16 with a scale per row.
  static constexpr int kKeys = parallax_tile_keys(kDim);
  static constexpr int kStages = parallax_tile_stages(kDim);
  static constexpr int kTileElements = kKeys * kDim;
  static constexpr int kGroups = 2;  // consumer warpgroups, 64 queries each
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // of the 168 a thread starts with
};

}  // namespace lla::cuda::sm90
