// What the kernels with x given have in common, for a row on its own and for a bundle.
#pragma once

#include "cuda/sm90/decode/load.cuh"

namespace lla::cuda::sm90::decode {

// A row on its own has one block of eight warps on a multiprocessor, a bundle two of four.
inline constexpr int kGivenXWarps = 8, kBundleWarps = 4;

template <int kDim_, bool kBf16_, bool kSmallPages_, int kWarps_>
struct GivenXConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kBf16 = kBf16_, kSmallPages = kSmallPages_;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kRawBytes = kWarpKeys * kDim * 2, kBoxBytes = kWarpKeys * 128;
  static constexpr bool kFetchValues = true;
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps, kTileStep = kWarps * kWarpKeys;
  static constexpr int kRawSlots = kDim == 128 ? 3 : 6;
};

}  // namespace lla::cuda::sm90::decode
