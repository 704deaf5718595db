// A block of the first of two passes (moments.cuh).
#pragma once

#include "cuda/sm90/decode/load.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kWeighers = 4;        // warps, of sixteen keys each
inline constexpr int kMultipliers = 4;     // warpgroups
inline constexpr int kRangeSlack = 16;     // bits in units of sqrt(w) that a logit may exceed the maximum by
inline constexpr int kNegligible = 20;     // what the sums may be behind a maximum before they follow
inline constexpr float kSpreadKeys = 8;    // of the first, that have the weight at least where two parts suffice
inline constexpr int kRestart = 16;        // tiles after which accumulators start anew: 1,024 keys
inline constexpr int kPreciseKeys = 1024;  // rows up to this long have their products in three parts

template <int kDim_, bool kSmallPages_>
struct MomentsConfig {
  static constexpr int kDim = kDim_, kChunks = kDim / 8;
  static constexpr bool kBf16 = true, kSmallPages = kSmallPages_, kFetchValues = false;
  static constexpr int kTileStep = 0;
  static constexpr int kRows = moments_bundle(kDim);
  static constexpr int kStages = kDim == 128 ? 12 : 16;
  static constexpr int kAhead = kStages - kWeighers;  // of them asked for before they are needed
  // A tile is asked for by the warp that has asked for the last one of its stage, or when a unit begins, with nothing
  // under way: who waits for that last one to be multiplied cannot take the end of an earlier use for it.
  static_assert(kStages % kWeighers == 0);
  static constexpr int kQuarters = kMomentsKeys / kWarpKeys, kRawSlots = kStages * kQuarters;
  static constexpr int kDisplaced = kWarpKeys / kRows;  // keys of a row that a warp has displaced, at most
  static constexpr int kBoxBytes = kMomentsKeys * 128;
  static constexpr int kStageBytes = kMomentsKeys * kDim * 2;
  static constexpr int kThreads = 128 * kMultipliers + 32 * kWeighers;
};

enum MomentsFlags : int32_t { kFresh = 1, kEnd = 2, kStop = 4 };  // of a tile

template <class C>
struct MomentsShared {
  struct Head {
    int32_t max[C::kRows];  // what the weights are relative to
    int32_t flags, partial;
  };
  alignas(1024) unsigned char stage[C::kStages][C::kStageBytes];
  alignas(1024) unsigned char extra[C::kStageBytes];  // first keys of the row, then those that were the heaviest
  alignas(1024) uint32_t ones[kWarpKeys * 32];  // two a word: a right operand of sixteen keys, whose columns are sums
  alignas(16) float weights[C::kStages + 1][C::kRows][kMomentsKeys];  // the last: of `extra`
  alignas(16) unsigned char apart[kWeighers][C::kRows][C::kDim * 2];  // the heaviest key of each warp
  Head head[C::kStages + 1];
  float query[C::kRows][C::kDim];
  float centre[C::kRows][C::kDim];
  int32_t plain[C::kRows], precise[C::kRows];  // plain: c is 0; precise: three parts
  float columns[kWeighers][C::kRows][C::kDim];
  float tops[kWeighers][C::kRows], places[kWeighers][C::kRows], seconds[kWeighers][C::kRows];
  float apart_logit[kWeighers][C::kRows], omega[kWeighers][C::kRows], squares[kWeighers][C::kRows];
  float omega_squared[kWeighers][C::kRows];
  int32_t max[kWeighers][C::kRows];
  float displaced[kWeighers][kWarpKeys];  // half logits; -inf: none
  Unit unit;
  Walk walk;
  Barrier full[C::kStages + 1], empty[C::kStages], finished;
  Barrier loaded[1][C::kRawSlots], first_loaded[kWeighers];

  __device__ __forceinline__ RawTile tile(int, int slot) {
    return {stage[slot / C::kQuarters] + slot % C::kQuarters * kWarpKeys * 128, nullptr};
  }
};
// What the ring sees for the first keys of a row.
template <class C>
struct FirstKeys {
  struct Config : C {
    static constexpr int kRawSlots = 1;
  };
  MomentsShared<C>& s;
  Barrier (*const loaded)[1] = reinterpret_cast<Barrier (*)[1]>(s.first_loaded);
  __device__ __forceinline__ RawTile tile(int warp, int) { return {s.extra + warp * kWarpKeys * 128, nullptr}; }
};

__device__ __forceinline__ void weighers_sync() { named_sync(kConverterBarrier, 32 * kWeighers); }

}  // namespace lla::cuda::sm90::decode
