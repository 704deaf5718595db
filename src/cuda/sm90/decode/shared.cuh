// A decode block: groups of four warps that convert keys and values, and one or two warpgroups that multiply what they
// made.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/decode/walk.cuh"
#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kTileKeys = 64;  // of a stage, made by a warpgroup of converters
inline constexpr int kWarpKeys = 16;  // of a warp
inline constexpr int kRestart = 16;   // tiles after which accumulators start anew: 1,024 keys

// kSmallPages: rows come one by one (load.cuh).
template <int kDim_, bool kBf16_, bool kSmallPages_>
struct Config {
  static constexpr int kDim = kDim_;
  static constexpr bool kBf16 = kBf16_, kSmallPages = kSmallPages_;
  static constexpr int kChunks = kDim / 8;        // of 16 bytes, of a row
  static constexpr int kMultipliers = kDim / 64;  // warpgroups
  // Groups of converters, each with a stage of its own: as many as there are registers for.
  static constexpr int kConverterWarpgroups = kDim == 128 ? 2 : 3;
  static constexpr int kWarps = 4 * kConverterWarpgroups, kConverters = 32 * kWarps;
  static constexpr int kThreads = kConverters + 128 * kMultipliers;
  static constexpr int kRawBytes = kWarpKeys * kDim * 2;  // keys (or values) of a warp
  static constexpr int kBoxBytes = kWarpKeys * 128;       // 64 columns of them
  static constexpr bool kFetchValues = true;
  static constexpr int kTileStep = 0;                    // no registers for pages looked up ahead (load.cuh)
  static constexpr int kRawSlots = kDim == 128 ? 2 : 3;  // tiles a warp has room for
  static constexpr int kPartBytes = kTileKeys * 128;     // 64 columns of a stage
  // Parts of a stage: keys, roots (of which 8 columns are used), values.
  static constexpr int kKeyParts = kDim / 64, kRootPart = kKeyParts, kValuePart = kKeyParts + 1;
  static constexpr int kStageBytes = kPartBytes * (2 * kKeyParts + 1);
};

enum TileFlags : int32_t { kFresh = 1, kEnd = 2, kStop = 4 };

struct TileHead {
  int32_t max[4];  // of each 16 keys
  int32_t flags, partial;
};

// Sixteen keys and their values as they came.
struct RawTile {
  unsigned char *keys, *values;
};

// What a unit found out of its row; the next one of the same row need not.
struct KnownRow {
  int32_t local;  // -1: none
  int32_t max;
  float key_scale, value_scale;
};

template <class C>
struct Shared {
  alignas(1024) unsigned char stage[C::kConverterWarpgroups][C::kStageBytes];
  alignas(1024) unsigned char raw[C::kWarps][C::kRawSlots][2][C::kRawBytes];
  alignas(16) unsigned char heaviest[C::kWarps][2][C::kDim * 2];
  float2 query_centre[C::kDim];  // query in logit units, scaled reference key
  float centre[C::kDim];
  float scratch[C::kWarps][C::kDim];
  float parts[C::kWarps];
  float more_parts[C::kWarps];
  float heaviest_logit[C::kWarps];
  int32_t warp_max[C::kWarps];
  Unit units[2];  // the one at work, and the next
  Walk walk;
  KnownRow row;
  int32_t overflow;  // products too large for fp16 operands
  TileHead head[C::kConverterWarpgroups];
  Barrier full[C::kConverterWarpgroups], empty[C::kConverterWarpgroups];
  Barrier finished;  // a unit's products are in its partial
  Barrier loaded[C::kWarps][C::kRawSlots];

  __device__ __forceinline__ RawTile tile(int warp, int slot) { return {raw[warp][slot][0], raw[warp][slot][1]}; }
};

template <bool kBf16>
__device__ __forceinline__ float2 widen_pair(uint32_t x) {
  if constexpr (kBf16) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&x));
  }
}
__device__ __forceinline__ float2 half_pair(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
__device__ __forceinline__ uint32_t to_half_pair(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t multiply_half_pairs(uint32_t a, uint32_t b) {
  const __half2 h = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&h);
}

// Four 8 x 8 matrices, transposed: a thread gets rows 2t, 2t + 1 of column g of each.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
// 4^exponent, 0 where that is too small for a float; `exponent` is below 64.
__device__ __forceinline__ float four_to(int exponent) {
  const int e = 2 * exponent + 127;
  return e <= 0 ? 0.0f : __int_as_float(min(e, 254) << 23);
}

}  // namespace lla::cuda::sm90::decode
