// The converting warps: from raw keys and values to K'' = fp16(r (k - c)), V'' = fp16(r v), r = fp16(2^8 sqrt(w)).
//
// Each warp takes sixteen keys of a tile and keeps its own maximum, its own sum of weights and its own heaviest key,
// which stays out of the products; nothing passes between warps but at the ends of a unit and every 1,024 keys, so that
// bits do not depend on who is first.
#pragma once

#include "cuda/sm90/decode/load.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr float kRootExponent = 8;  // r = 2^8 at the maximum
inline constexpr float kSlack = 3;         // bits a logit may exceed the maximum by
inline constexpr int kMostRedos = 2;
inline constexpr int kRedoBits = 8;

template <class C>
__device__ __forceinline__ void converters_sync() {
  named_sync(kConverterBarrier, C::kConverters);
}

__device__ __forceinline__ float column_sum(float x) {  // over the threads that share a key
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}
__device__ __forceinline__ float keys_max(float x) {  // over the threads that share a column
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float keys_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class C>
struct Converter {
  Shared<C>& s;
  const Params& p;
  const int lane, warp, warpgroup;  // warp: of all; warpgroup: the stage it fills
  float omega;
  float heaviest;  // its half logit
  int max;
  float key_scale, value_scale;

  __device__ __forceinline__ Converter(Shared<C>& shared, const Params& params, int thread)
      : s(shared), p(params), lane(thread % 32), warp(thread / 32), warpgroup(thread / 128) {}

  // Key (of the sixteen) that element j of a quadruple belongs to: 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ __forceinline__ int key_at(int j) const { return (j / 2) * 8 + (lane % 4) * 2 + j % 2; }

  // Where this lane writes chunks 0 and 1 into the stage; of chunks 2i, 2i + 1 it is that ^ 32 (i % 4), and
  // kPartBytes (i / 4) further.
  __device__ __forceinline__ uint32_t staged_address() const {
    const int row = (warp % 4) * kWarpKeys + lane % 16;
    return opaque(shared_address(s.stage[warpgroup]) + row * 128 + ((lane / 16) ^ (row & 7)) * 16);
  }
  __device__ __forceinline__ static uint32_t staged_at(uint32_t start, int part, int i) {
    return (start ^ (32 * (i % 4))) + (part + i / 4) * C::kPartBytes;
  }

  // The roots' part: of each key a row of eight, the first of which counts. Lanes 0 to 15 write a key each.
  __device__ __forceinline__ void store_roots(const uint32_t (&roots)[2]) const {
    const int j = lane / 4;  // of this thread's four keys
    const uint32_t pair = j / 2 == 0 ? roots[0] : roots[1];
    const uint32_t root = j % 2 == 0 ? pair & 0xffff : pair >> 16;
    const int row = (warp % 4) * kWarpKeys + key_at(j);
    if (j < 4) {
      *reinterpret_cast<uint4*>(s.stage[warpgroup] + C::kRootPart * C::kPartBytes + row * 128 + (row & 7) * 16) =
          make_uint4(root, 0, 0, 0);
    }
  }

  // Half logits of this thread's four keys of those in `seen`. With kKeep the scaled, centred keys as fp16 pairs.
  template <bool kKeep>
  __device__ __forceinline__ void logits(float (&logit)[4], uint32_t (&pairs)[2 * C::kChunks],
                                         const unsigned char* rows, uint32_t seen) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) logit[j] = 0;
    const uint32_t from = raw_start(rows);
#pragma unroll
    for (int i = 0; i < C::kChunks / 2; ++i) {
      uint32_t raw[4];
      load_transposed(raw, raw_at(from, i));
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float2 qc = s.query_centre[8 * (2 * i + c) + lane / 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 k = widen_pair<C::kBf16>(raw[2 * c + h]);
          logit[2 * h] = fmaf(qc.x, k.x, logit[2 * h]);
          logit[2 * h + 1] = fmaf(qc.x, k.y, logit[2 * h + 1]);
          if constexpr (kKeep) {
            pairs[4 * i + 2 * c + h] = to_half_pair(fmaf(k.x, key_scale, -qc.y), fmaf(k.y, key_scale, -qc.y));
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      logit[j] = column_sum(logit[j]);
      if (!(seen >> key_at(j) & 1)) logit[j] = -INFINITY;
    }
  }
  __device__ __forceinline__ static float largest(const float (&logit)[4]) {
    return keys_max(fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3])));
  }

  // Changes places: the key with the largest logit leaves the tile, the heaviest so far (if any) takes its place.
  // Returns the key whose place is empty now, as a bit, or 0.
  __device__ __forceinline__ uint32_t exchange(const RawTile& raw, const float (&logit)[4], float largest) {
    int key = 99;
#pragma unroll
    for (int j = 3; j >= 0; --j) key = logit[j] == largest ? key_at(j) : key;
    key = min(key, __shfl_xor_sync(0xffffffffu, key, 1));
    key = min(key, __shfl_xor_sync(0xffffffffu, key, 2));
    for (int which = 0; which < 2; ++which) {
      for (int word = lane; word < C::kDim / 2; word += 32) {
        unsigned char* const rows = which == 0 ? raw.keys : raw.values;
        uint32_t& in_tile = *reinterpret_cast<uint32_t*>(rows + raw_offset(key, word / 4) + word % 4 * 4);
        uint32_t& apart = reinterpret_cast<uint32_t*>(s.heaviest[warp][which])[word];
        const uint32_t old = apart;
        apart = in_tile;
        in_tile = heaviest > -INFINITY ? old : 0;
      }
    }
    const uint32_t empty = heaviest > -INFINITY ? 0 : 1u << key;
    heaviest = largest;
    fence_async_proxy();  // the copy engine writes here next
    __syncwarp();
    return empty;
  }

  // One tile's sixteen keys of this warp into the stage. `parity`: of the stage's becoming empty.
  template <bool kApart>
  __device__ __forceinline__ void tile(const RawTile& raw, uint32_t seen, uint32_t parity, int flags, int partial) {
    uint32_t pairs[2 * C::kChunks];
    float logit[4];
#pragma unroll 1
    for (;;) {
      logits<true>(logit, pairs, raw.keys, seen);
      // Rarely is anything to be done about the largest: a vote costs less than finding it.
      const float own = fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));
      if (kApart && __any_sync(0xffffffffu, own > heaviest)) {
        seen &= ~exchange(raw, logit, keys_max(own));
        continue;
      }
      if (__any_sync(0xffffffffu, own > static_cast<float>(max) + kSlack)) {
        const int higher = static_cast<int>(ceilf(fminf(keys_max(own), 1e6f)));
        omega *= four_to(max - higher);
        max = higher;
      }
      break;
    }
    float r[4];
    uint32_t roots[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      roots[h] = to_half_pair(exp2_fast(logit[2 * h] - static_cast<float>(max) + kRootExponent),
                              exp2_fast(logit[2 * h + 1] - static_cast<float>(max) + kRootExponent));
      const float2 rounded = half_pair(roots[h]);
      r[2 * h] = rounded.x, r[2 * h + 1] = rounded.y;
      omega = fmaf(rounded.x, rounded.x, fmaf(rounded.y, rounded.y, omega));
    }
    // Values are on their way while keys are multiplied, and the second half of them while the first is.
    constexpr int kHalf = C::kChunks / 4;
    const uint32_t staged = staged_address(), values = raw_start(raw.values);
    uint32_t early[kHalf][4], late[kHalf][4];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) load_transposed(early[i], raw_at(values, i));
    s.empty[warpgroup].wait(parity);
#pragma unroll
    for (int i = 0; i < C::kChunks / 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) pairs[4 * i + e] = multiply_half_pairs(pairs[4 * i + e], roots[e % 2]);
      store_transposed(staged_at(staged, 0, i), pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) load_transposed(late[i], raw_at(values, kHalf + i));
    store_roots(roots);
#pragma unroll
    for (int j = 0; j < 4; ++j) r[j] *= value_scale;
    const auto store_values = [&](uint32_t(&v)[4], int i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 wide = widen_pair<C::kBf16>(v[e]);
        v[e] = to_half_pair(wide.x * r[2 * (e % 2)], wide.y * r[2 * (e % 2) + 1]);
      }
      store_transposed(staged_at(staged, C::kValuePart, i), v[0], v[1], v[2], v[3]);
    };
#pragma unroll
    for (int i = 0; i < kHalf; ++i) store_values(early[i], i);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) store_values(late[i], kHalf + i);
    TileHead& head = s.head[warpgroup];
    if (lane == 0) {
      head.max[warp % 4] = max;
      if (warp % 4 == 0) head.flags = flags, head.partial = partial;
    }
    fence_async_proxy();
    __syncwarp();
    s.full[warpgroup].arrive_for_warp();
  }

  __device__ __forceinline__ void clear() {
    omega = 0;
    heaviest = -INFINITY;
  }
};

}  // namespace lla::cuda::sm90::decode
