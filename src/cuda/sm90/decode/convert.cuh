// The converting warps: from raw keys and values to K'' = fp16(r (k - c)), V'' = fp16(r v), r = fp16(2^8 sqrt(w)), in the
// place where they lie.
//
// Each warp takes whole stages, in turn with the others, and keeps its own maximum, its own sum of weights and its own
// heaviest key, which stays out of the products; what passes between warps is known long before it is looked at, so
// that bits do not depend on who is first.
#pragma once

#include "cuda/sm90/decode/stages.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr float kRootExponent = 8;  // r = 2^8 at the maximum
inline constexpr float kSlack = 3;         // bits a logit may exceed the maximum by
inline constexpr int kRedoBits = 8;

__device__ __forceinline__ float warp_max(float x) {
  return warp_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

template <class C>
struct Converter {
  static constexpr int kSteps = C::kDim / 16;  // sixteen columns each
  static constexpr int kTiles = C::kPieceKeys / kWarpKeys;

  Shared<C>& s;
  const Params& p;
  const int lane, warp;
  UnitState<C>* unit;
  float omega;     // of this lane's keys; four lanes have the same
  float heaviest;  // its half logit
  int max;
  float key_scale, value_scale;

  __device__ __forceinline__ Converter(Shared<C>& shared, const Params& params, int thread)
      : s(shared), p(params), lane(thread % 32), warp(thread / 32) {}

  // Sixteen keys are a matrix of which a lane has rows g and g + 8; `j` counts a lane's keys.
  __device__ __forceinline__ int key_at(int j) const { return j / 2 * kWarpKeys + lane / 4 + j % 2 * 8; }
  // Where this lane begins to read and write rows.
  __device__ __forceinline__ uint32_t start_of(const unsigned char* rows) const {
    return opaque(shared_address(rows) + lane % 16 * 128 + ((lane / 16) ^ (lane & 7)) * 16);
  }
  // The same of columns 16 i ... of tile m.
  __device__ __forceinline__ static uint32_t at(uint32_t start, int m, int i) {
    return (start ^ (32 * (i % 4))) + i / 4 * C::kPartBytes + m * (kWarpKeys * 128);
  }

  template <int kFirst = 0, int kCount, int kColumns>
  __device__ __forceinline__ void load(uint32_t (&to)[kCount][kColumns][4], uint32_t from) const {
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) load_matrices(to[m][i], at(from, m, kFirst + i));
    }
  }
  // Half logits of this lane's keys. All columns of the right-hand side are the query: all four lanes of a row have its
  // product.
  template <int kCount>
  __device__ __forceinline__ void logits(float (&logit)[2 * kCount], const uint32_t (&k)[kCount][kSteps][4],
                                         uint32_t seen) const {
    float sum[kCount][2][4]{};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint2 q = unit->query[4 * i + lane % 4];
#pragma unroll
      for (int m = 0; m < kCount; ++m) warp_product<C::kBf16>(sum[m][i % 2], k[m][i], q.x, q.y);
    }
#pragma unroll
    for (int j = 0; j < 2 * kCount; ++j) {
      const float product = sum[j / 2][0][j % 2 * 2] + sum[j / 2][1][j % 2 * 2];
      logit[j] = seen >> key_at(j) & 1 ? product * p.half_scale : -INFINITY;
    }
  }

  // Changes places: the key with the largest logit leaves the piece, the heaviest so far (if any) takes its place.
  // Returns the key whose place is empty now, as a bit, or 0.
  __device__ __forceinline__ uint32_t exchange(unsigned char* rows, uint32_t key, float largest) {
    for (int which = 0; which < 2; ++which) {
      for (int word = lane; word < C::kDim / 2; word += 32) {
        uint32_t& in_tile = *reinterpret_cast<uint32_t*>(rows + which * C::kValues +
                                                         raw_offset<C::kPartBytes>(key, word / 4) + word % 4 * 4);
        uint32_t& apart = reinterpret_cast<uint32_t*>(unit->heaviest[warp][which])[word];
        const uint32_t old = apart;
        apart = in_tile;
        in_tile = heaviest > -INFINITY ? old : 0;
      }
    }
    const uint32_t empty = heaviest > -INFINITY ? 0 : 1u << key;
    heaviest = largest;
    __syncwarp();
    return empty;
  }

  __device__ __forceinline__ void raise_maximum(int higher) {
    omega *= four_to(::max(max - higher, -100));
    max = higher;
  }

  // Some keys of a stage, from the first-th on; `seen`: those that count.
  template <bool kApart>
  __device__ __forceinline__ void piece(int stage, int first, uint32_t seen) {
    unsigned char* const rows = s.stage[stage] + first * 128;
    const Roots<C> roots(s, stage);
    const uint32_t keys = start_of(rows), values = keys + C::kValues;
    uint32_t k[kTiles][kSteps][4], early[kTiles][kSteps / 2][4], late[kTiles][kSteps / 2][4];
    float logit[2 * kTiles];
#pragma unroll 1
    for (;;) {
      load(k, keys);
      logits(logit, k, seen);
      // Rarely is anything to be done about the largest: a vote costs less than finding it.
      float own = logit[0];
#pragma unroll
      for (int j = 1; j < 2 * kTiles; ++j) own = fmaxf(own, logit[j]);
      if (kApart && __any_sync(0xffffffffu, own > heaviest)) {
        const float largest = warp_max(own);
        uint32_t key = 99;
#pragma unroll
        for (int j = 2 * kTiles - 1; j >= 0; --j) key = logit[j] == largest ? key_at(j) : key;
        seen &= ~exchange(rows, __reduce_min_sync(0xffffffffu, key), largest);
        continue;
      }
      if (__any_sync(0xffffffffu, own > static_cast<float>(max) + kSlack)) {
        raise_maximum(static_cast<int>(ceilf(fminf(warp_max(own), 1e6f))));
      }
      break;
    }
    load(early, values);  // on their way while keys are converted, the others while these are
    const float base = kRootExponent - static_cast<float>(max);
    uint32_t twice[2 * kTiles];
    float root[2 * kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const uint32_t pair = to_half_pair(exp2_fast(logit[2 * m] + base), exp2_fast(logit[2 * m + 1] + base));
      twice[2 * m] = __byte_perm(pair, pair, 0x1010), twice[2 * m + 1] = __byte_perm(pair, pair, 0x3232);
      const float2 rounded = half_pair(pair);
      omega = fmaf(rounded.x, rounded.x, fmaf(rounded.y, rounded.y, omega));
      root[2 * m] = rounded.x * value_scale, root[2 * m + 1] = rounded.y * value_scale;
      if (lane % 4 == 0) {
        roots.at(first + key_at(2 * m)) = pair & 0xffff;
        roots.at(first + key_at(2 * m + 1)) = pair >> 16;
      }
    }
    // A store holds up all loads behind it: the reference key is read ahead, as far as there are registers.
    constexpr int kAhead = C::kDim == 128 ? 1 : 2;
    const float2* const centre = &unit->scaled_centre[lane % 4];
    float2 ahead[kAhead][2];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i][0] = centre[8 * i], ahead[i][1] = centre[8 * i + 4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float2 near = ahead[i % kAhead][0], far = ahead[i % kAhead][1];
      if (const int next = i + kAhead; next < kSteps) {
        ahead[i % kAhead][0] = centre[8 * next], ahead[i % kAhead][1] = centre[8 * next + 4];
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // rows g (+ 8: odd e), columns 2 t, 2 t + 1 (+ 8: e above 1)
          const float2 wide = widen_pair<C::kBf16>(k[m][i][e]), c = e < 2 ? near : far;
          k[m][i][e] = multiply_half_pairs(to_half_pair(fmaf(wide.x, key_scale, -c.x), fmaf(wide.y, key_scale, -c.y)),
                                           twice[2 * m + e % 2]);
        }
        store_matrices(at(keys, m, i), k[m][i]);
      }
    }
    load<kSteps / 2>(late, values);
    const auto convert = [&](uint32_t(&v)[kTiles][kSteps / 2][4], int first) {
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 wide = widen_pair<C::kBf16>(v[m][i][e]);
            v[m][i][e] = to_half_pair(wide.x * root[2 * m + e % 2], wide.y * root[2 * m + e % 2]);
          }
          store_matrices(at(values, m, first + i), v[m][i]);
        }
      }
    };
    convert(early, 0);
    convert(late, kSteps / 2);
  }

  // The maximum that all had a ring of stages ago, where that is larger. `tile`: of the unit.
  __device__ __forceinline__ void follow_maximum(int tile) {
    const int from = tile - C::kStages - lane;
    const int there = lane < C::kWarps && from >= 0 ? unit->posted[from % kPosted] : max;
    const int all = __reduce_max_sync(0xffffffffu, there);
    if (all > max) raise_maximum(all);
  }

  // A tile of the unit, keys [begin, end) of its stage.
  __device__ __forceinline__ void stage(int stage, int tile, int begin, int end, int flags, int partial) {
    follow_maximum(tile);
    StageHead& head = s.head[stage];
#pragma unroll 1
    for (int i = 0; i < C::kPieces; ++i) {
      const int from = ::max(0, begin - i * C::kPieceKeys), upto = ::min(C::kPieceKeys, end - i * C::kPieceKeys);
      const uint32_t seen = upto <= from ? 0 : (0xffffffffu >> (32 - upto)) & (0xffffffffu << from);
      piece<true>(stage, i * C::kPieceKeys, seen);
      if (lane == 0) head.max[i] = max;
    }
    if (lane == 0) head.flags = flags, head.partial = partial, unit->posted[tile % kPosted] = max;
    fence_async_proxy();
    __syncwarp();
    s.full[stage].arrive_for_warp();
  }

  __device__ __forceinline__ void begin(UnitState<C>& of, int from_max) {
    unit = &of;
    omega = 0;
    heaviest = -INFINITY;
    max = from_max, key_scale = of.key_scale, value_scale = of.value_scale;
  }

  // Whether what is apart is too large for the scales.
  __device__ __forceinline__ int32_t too_large() const {
    bool keys = false, values = false;
    if (heaviest > -INFINITY) {
#pragma unroll 1
      for (int word = lane; word < C::kDim / 2; word += 32) {
        const float2 k = widen_pair<C::kBf16>(reinterpret_cast<const uint32_t*>(unit->heaviest[warp][0])[word]);
        const float2 v = widen_pair<C::kBf16>(reinterpret_cast<const uint32_t*>(unit->heaviest[warp][1])[word]);
        const float key =
            fmaxf(fabsf(k.x - unit->centre[2 * word]), fabsf(k.y - unit->centre[2 * word + 1])) * key_scale;
        const float value = fmaxf(fabsf(v.x), fabsf(v.y)) * value_scale;
        keys |= key >= 31, values |= value >= 31;
      }
    }
    return (__any_sync(0xffffffffu, keys) ? kKeysTooLarge : 0) |
           (__any_sync(0xffffffffu, values) ? kValuesTooLarge : 0);
  }
  // What the end of the unit needs.
  __device__ __forceinline__ void leave() const {
    const int32_t large = too_large();
    const float all = warp_sum(lane % 4 == 0 ? omega : 0);
    if (lane == 0) {
      unit->heaviest_logit[warp] = heaviest, unit->omega[warp] = all;
      unit->max[warp] = max, unit->large[warp] = large;
    }
    __syncwarp();
  }
};

// Zeros into the rows of a stage that do not count; its first is key `first`.
template <class C>
__device__ __forceinline__ void clear_outside(unsigned char* rows, const Keys& keys, int first) {
#pragma unroll 1
  for (int from = 0; from < C::kStageKeys; from += kWarpKeys) {
    unsigned char* const tile = rows + from * 128;
    const uint32_t seen = seen_of(keys, first + from);
    if (seen != 0xffffu) clear_rows<C, C::kPartBytes>({tile, tile + C::kValues}, seen);
  }
  __syncwarp();
}

// All units of the block, by a converting warp.
template <class C>
__device__ __forceinline__ void convert_units(Shared<C>& s, const Params& p, int thread) {
  Converter<C> c(s, p, thread);
  uint32_t base = 0;
#pragma unroll 1
  for (int index = 0;; ++index) {
    const FetchedUnit& fetched = s.units[index & 1];
    s.ready[index & 1].wait((index / 2) & 1);
    const Unit& u = fetched.unit;
    if (u.local == kNoMore) break;
    if (u.local == kNoUnit) {
      __syncwarp();
      s.left[index & 1].arrive_for_warp();
      continue;
    }
    const Steps<C> steps(fetched);
    UnitState<C>& state = s.state[index & 1];
    c.begin(state, state.row_max);
#pragma unroll 1
    for (int tile = c.warp; tile < steps.tiles; tile += C::kWarps) {
      const uint32_t position = base + steps.before + tile;
      const int stage = stage_of<C>(position), first = u.start + tile * C::kStageKeys;
      const int begin = max(0, u.keys.begin - first), end = min(C::kStageKeys, u.keys.end - first);
      wait_for(s, position);
      if (begin > 0 || end < C::kStageKeys) clear_outside<C>(s.stage[stage], u.keys, first);
      const int flags = tile > 0 ? 0 : steps.tiles < C::kRestart ? kUnitBegins | kUnitIsShort : kUnitBegins;
      c.stage(stage, tile, begin, end, flags, u.partial);
    }
    c.leave();
    s.left[index & 1].arrive_for_warp();
    base += steps.count();
  }
}

}  // namespace lla::cuda::sm90::decode
