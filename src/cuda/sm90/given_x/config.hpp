// Tile sizes of the kernel for a given x, with the reason beside each.
#pragma once

#include "cuda/tensor/schedule.hpp"

namespace lla::cuda::sm90 {

// Keys per tile. Registers of a consumer thread: two accumulators (dim / 2 + 4 each), one block for the scores and then
// for E (keys / 2), packed W and U (keys / 4 each). D = 128: 64 keys take 200 of 240; with 80 (216) ptxas runs out and
// serialises the products. D = 64: 128 keys take 200.
constexpr int given_x_tile_keys(int dim) { return dim == 128 ? 64 : 128; }

template <int kDim_, bool kXTwoParts_, bool kFewKeys_ = false>
struct GivenXConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kXTwoParts =
      kXTwoParts_;  // x as high and low part: f32. A 16-bit x fits fp16 with a scale per row.
  // Where no row sees more than few keys roundings do not average out: U is multiplied in two parts.
  static constexpr bool kFewKeys = kFewKeys_;
  static constexpr int kKeys = given_x_tile_keys(kDim);
  static constexpr int kTileElements = kKeys * kDim;
  static constexpr int kOnesElements =
      kKeys * 64;  // behind each tile of values: its columns are summed with the values'
  // Tiles in flight: what fits beside Q and x. D = 128: 16 KiB of keys, 24 of values with their ones; D = 64: 16
  // and 32.
  static constexpr int kKeyStages = kDim == 128 ? 3 : 4;
  static constexpr int kValueStages = kDim == 128 && !kXTwoParts ? 4 : 3;
  static constexpr int kWarpgroups = 2;  // consumer warpgroups, 64 queries each
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // of the 168 a thread starts with
};

}  // namespace lla::cuda::sm90
