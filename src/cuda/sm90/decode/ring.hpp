// The streaming kernel in numbers: stages of how many keys its ring has, how many warps are at which of them. No CUDA:
// a test models the ring's waits with them.
#pragma once

namespace lla::cuda::sm90::decode {

inline constexpr int kReferenceKeys = 128;  // the row's first, for the reference key

// kSmallPages: rows come one by one (load.cuh).
template <int kDim_, bool kBf16_, bool kSmallPages_>
struct Config {
  static constexpr int kDim = kDim_;
  static constexpr bool kBf16 = kBf16_, kSmallPages = kSmallPages_;
  static constexpr int kChunks = kDim / 8;        // of 16 bytes, of a row
  static constexpr int kParts = kDim / 64;        // 64 columns of the keys, and as many of the values
  static constexpr int kMultipliers = kDim / 64;  // warpgroups
  static constexpr int kFetchers = (kSmallPages ? 4 : 2) / kMultipliers;  // warps
  static constexpr int kThreads = 512;
  // Warps that convert. One more looks after the units.
  static constexpr int kWarps = kThreads / 32 - 4 * kMultipliers - kFetchers - 1, kConverters = 32 * kWarps;
  static constexpr int kStages = kDim == 128 ? 10 : 12;
  static constexpr int kStageKeys = 4096 / kDim;
  static constexpr int kPieces = 2, kPieceKeys = kStageKeys / kPieces;  // what a warp has in registers at a time
  static constexpr int kPartBytes = kStageKeys * 128;
  // The roots are eight more columns behind the keys', for the tensor cores as far from the last 64 as these from those
  // before. At head dimension 128 that is a part of the stage; at 64 any distance will do, and eight stages share one.
  static constexpr bool kRootsInStage = kDim == 128;
  static constexpr int kValues = (kParts + (kRootsInStage ? 1 : 0)) * kPartBytes;  // where they begin
  static constexpr int kStageBytes = kValues + kParts * kPartBytes;
  static constexpr int kRootBytes = kRootsInStage ? 16 : (kStages + 7) / 8 * kPartBytes;
  // Stages after which sums on the tensor cores start anew: 1,024 keys, and those that were kept apart.
  static constexpr int kRestart = 1024 / kStageKeys + 1;
  // Who comes to wait for a stage takes it for granted that the stage's last keys have been asked for (`wait_for` in
  // stages.cuh). So they have: a converting warp has waited for the stage kWarps before, or in its first of a unit
  // somebody for all before the unit's tiles; and stages are asked for one after the other.
  static_assert(kWarps <= kStages);
};

}  // namespace lla::cuda::sm90::decode
