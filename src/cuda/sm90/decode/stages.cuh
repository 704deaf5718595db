// What passes between the warps of a block of the streaming kernel.
//
// Keys and values lie in a ring of stages as the copy engine left them, are converted where they lie, and are
// multiplied from there. One or two warps fetch (four of single rows), others convert, each a stage of its own, one
// looks after the beginnings and ends of units, one or two warpgroups multiply.
#pragma once

#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/decode/ring.hpp"

namespace lla::cuda::sm90::decode {

// Named barriers: of the fetching warps, and of each multiplying warpgroup.
inline constexpr int kFetcherBarrier = kConverterBarrier, kMultiplierBarrier = kConverterBarrier + 1;

enum StageFlags : int32_t {
  kUnitBegins = 1,
  kUnitEnds = 2,  // only its first piece counts: keys that were kept apart
  kNothing = 4,   // no keys to multiply
  kStop = 8,
  kUnitIsShort = 16,  // of one that begins: its sums need not start anew
};

struct alignas(16) StageHead {
  int32_t max[2];  // of each piece
  int32_t flags, partial;
};

// What the fetching warps tell of a unit.
inline constexpr int kNoUnit = -1, kNoMore = -2;  // in `unit.local`: none for now, none any more
struct FetchedUnit {
  Unit unit;
  int32_t before;    // stages of the row's first keys, where the unit does not begin with them
  int32_t redo;      // how often it has been tried before, each time with values' scale smaller
  int32_t key_redo;  // how often with keys' scale smaller, too: needlessly small, they would lose their digits
  int32_t known;     // its row is that of the unit before
  int32_t missing;
};

inline constexpr int kPosted = 64;

// A unit at work; there is room for two.
template <class C>
struct UnitState {
  alignas(16) unsigned char heaviest[C::kWarps][2][C::kDim * 2];
  uint2 query[C::kDim / 4];           // of sixteen columns, by t: 2 t, 2 t + 1, 2 t + 8, 2 t + 9
  float2 scaled_centre[C::kDim / 2];  // reference key times the keys' scale
  float centre[C::kDim];
  int32_t row_max;                       // of the row's first keys
  float row_key_scale, row_value_scale;  // from them
  float key_scale, value_scale;
  // Of each converting warp, at its end of the unit.
  float heaviest_logit[C::kWarps], omega[C::kWarps];
  int32_t max[C::kWarps], large[C::kWarps];
  int32_t posted[kPosted];  // the maximum of each stage
};

template <class C>
struct Shared {
  alignas(1024) unsigned char stage[C::kStages][C::kStageBytes];
  alignas(1024) unsigned char root[C::kRootBytes];
  UnitState<C> state[2];
  float first_logit[kReferenceKeys];
  FetchedUnit units[2], next;  // next: taken, and nobody has been told
  Walk start;
  int32_t overflow;  // some unit is to be repeated
  StageHead head[C::kStages];
  Barrier loaded[C::kStages], full[C::kStages], empty[C::kStages];
  // Of units: fetched, ready to be converted, left by all converting warps, and done with.
  Barrier taken[2], ready[2], left[2], done[2];
};

// The roots of a stage: the first of eight columns, of which the others are 0, of 64 that lie as those of the keys do.
template <class C>
struct Roots {
  unsigned char* rows;
  int chunk;  // of 16 bytes

  __device__ __forceinline__ Roots(Shared<C>& s, int stage)
      : rows(C::kRootsInStage ? s.stage[stage] + C::kParts * C::kPartBytes : s.root + stage / 8 * C::kPartBytes),
        chunk(C::kRootsInStage ? 0 : stage % 8) {}
  __device__ __forceinline__ uint16_t& at(int key) const {
    return *reinterpret_cast<uint16_t*>(rows + key * 128 + (chunk ^ (key & 7)) * 16);
  }
  // How far they are behind the last 64 columns of the keys.
  __device__ __forceinline__ uint32_t distance(const unsigned char* stage) const {
    if (C::kRootsInStage) return C::kPartBytes;
    return shared_address(rows) + chunk * 16 - shared_address(stage);
  }
};

// Stages are counted over the block's life.
template <class C>
__device__ __forceinline__ int stage_of(uint32_t position) {
  return position % C::kStages;
}
template <class C>
__device__ __forceinline__ uint32_t parity_of(uint32_t position) {
  return (position / C::kStages) & 1;
}

// Until what is asked for at `position` is there. Of a barrier's phases only the parity is known, and who comes to a stage
// before its last keys are there would take those before them for its own: so first until those who multiply are done
// with the last ones. That cannot be mistaken: nobody comes here before the last keys have been asked for.
template <class C>
__device__ __forceinline__ void wait_for(Shared<C>& s, uint32_t position) {
  const int stage = stage_of<C>(position);
  const uint32_t parity = parity_of<C>(position);
  s.empty[stage].wait(parity ^ 1);
  s.loaded[stage].wait(parity);
}

// The stages of a unit, in order: the row's first keys where the unit needs them beside its own, its tiles, and one for
// the keys that were kept apart.
template <class C>
struct Steps {
  int before, tiles;
  __device__ __forceinline__ explicit Steps(const FetchedUnit& u)
      : before(u.before), tiles(max(0, u.unit.keys.end - u.unit.start + C::kStageKeys - 1) / C::kStageKeys) {}
  __device__ __forceinline__ int count() const { return before + tiles + 1; }
};

}  // namespace lla::cuda::sm90::decode
