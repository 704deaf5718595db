// Tile sizes of the forward kernel, with the reason beside each.
#pragma once

#include <cstdint>

#include "cuda/sm90/schedule.hpp"

namespace lla::cuda::sm90 {

// Keys per tile. Registers of a consumer thread in a CG pass: scores and E (keys / 2 each), the accumulator (dim / 2),
// packed U (keys / 4). D = 128: 96 keys leave 240 - 184 for everything else, 128 would leave 16. D = 64: 128 keys, 192.
constexpr int tile_keys(int dim) { return dim == 128 ? 96 : 128; }

// Shared memory holds Q, the direction P, the residual r and as many tiles as fit, a power of two (4 x 24 or 8 x 16 KiB).
constexpr int tile_stages(int dim) { return dim == 128 ? 4 : 8; }

template <int kDim_, bool kCached_>
struct ForwardConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kCached = kCached_;  // weights kept in the workspace instead of recomputed in every pass
  static constexpr int kKeys = tile_keys(kDim);
  static constexpr int kStages = tile_stages(kDim);
  static constexpr int kTileElements = kKeys * kDim;
  static constexpr int kGroups = 2;  // consumer warpgroups, 64 queries each
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // of the 168 a thread starts with
  static constexpr int kBlockOperand = kBlockRows * kDim;        // elements of Q or P
  static constexpr int kLiveWords = 128;                         // tiles beyond 32 times this are never skipped
};

constexpr int64_t cached_weights_bytes(const Shape& s, int dim) {
  return most_tiles(s, tile_keys(dim)) * kBlockRows * tile_keys(dim) * 2;
}

}  // namespace lla::cuda::sm90
