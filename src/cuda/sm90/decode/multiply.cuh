// The consumer warpgroups: V''ᵀ [K'' | r] and K''ᵀ [K'' | r], without the block that is known by symmetry.
#pragma once

#include "cuda/sm90/decode/load.cuh"
#include "cuda/sm90/mma.cuh"

namespace lla::cuda::sm90::decode {

template <int kColumns>
struct OuterProduct;
template <>
struct OuterProduct<72> {
  using Atom = cute::SM90::GMMA::MMA_64x72x16_F32F16F16_SS<detail::Major::MN, detail::Major::MN>;
};
template <>
struct OuterProduct<136> {
  using Atom = cute::SM90::GMMA::MMA_64x136x16_F32F16F16_SS<detail::Major::MN, detail::Major::MN>;
};

// Adds the accumulators to the partial's matrix. Its threads alone know these places, and read, add and write them: ten
// times as fast as to have L2 add.
template <int kCount>
__device__ __forceinline__ void flush(float4* to, float (&acc)[kCount], bool first, float old_factor, float factor) {
  constexpr int kAtOnce = 4;
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int from = 0; from < kCount / 4; from += kAtOnce) {
    float4 old[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      if (from + e < kCount / 4) old[e] = first ? float4{0, 0, 0, 0} : __ldcg(&to[(from + e) * 128 + thread]);
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int i = from + e;
      if (i >= kCount / 4) continue;
      __stcg(
          &to[i * 128 + thread],
          {fmaf(old[e].x, old_factor, acc[4 * i] * factor), fmaf(old[e].y, old_factor, acc[4 * i + 1] * factor),
           fmaf(old[e].z, old_factor, acc[4 * i + 2] * factor), fmaf(old[e].w, old_factor, acc[4 * i + 3] * factor)});
    }
    asm volatile("" ::: "memory");
  }
}

// What a warpgroup multiplies: values' rows 64 kWarpgroup .. times all keys, and, at head dimension 128, warpgroup 0
// the second block of keys' rows, 1 the first.
template <class C, int kWarpgroup>
struct Accumulators {
  static constexpr int kKeyBlock = C::kDim == 64 ? 0 : 1 - kWarpgroup;
  static constexpr int kKeyParts = C::kKeyParts - kKeyBlock;  // of its columns
  static constexpr int kValueColumns = C::kDim + 8, kKeyColumns = 64 * kKeyParts + 8;
  using ValueAtom = typename detail::Atom<kValueColumns, detail::Major::MN>::RS;
  using KeyAtom = typename OuterProduct<kKeyColumns>::Atom;
  float values[kValueColumns / 2], keys[kKeyColumns / 2];

  __device__ __forceinline__ void pin_all() { pin(values), pin(keys); }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& x : values) x *= factor;
#pragma unroll
    for (float& x : keys) x *= factor;
  }
  __device__ __forceinline__ bool finite() const {
    float sum = 0;  // 0 times what is not finite is NaN
#pragma unroll
    for (const float x : values) sum = fmaf(x, 0.0f, sum);
#pragma unroll
    for (const float x : keys) sum = fmaf(x, 0.0f, sum);
    return sum == 0;
  }
  __device__ __forceinline__ void multiply_keys(const detail::Operand& stage, int k, bool add) {
    const uint64_t from = stage.at(k * 128 + kKeyBlock * C::kPartBytes / 16);
    detail::issue_ss<KeyAtom>(keys, from, from, add ? detail::ScaleOut::One : detail::ScaleOut::Zero,
                              std::make_index_sequence<kKeyColumns / 2>{});
  }
  __device__ __forceinline__ void multiply_values(const uint32_t (&a)[4], const detail::Operand& stage, int k,
                                                  bool add) {
    detail::issue_rs<ValueAtom>(values, a, stage.at(k * 128), std::make_index_sequence<kValueColumns / 2>{},
                                add ? detail::ScaleOut::One : detail::ScaleOut::Zero);
  }
  // `partial_max`: what the partial's matrix is relative to.
  __device__ __forceinline__ void add_to(float* matrix, bool first, int acc_max, int& partial_max) {
    const int max = first || acc_max > partial_max ? acc_max : partial_max;
    const float old_factor = first ? 0 : four_to(partial_max - max), factor = four_to(acc_max - max);
    partial_max = max;
    float* const value_rows = matrix + value_tile(C::kDim, kWarpgroup).from;
    float* const key_rows = matrix + key_tile(C::kDim, kKeyBlock).from;
    flush(reinterpret_cast<float4*>(value_rows), values, first, old_factor, factor);
    flush(reinterpret_cast<float4*>(key_rows), keys, first, old_factor, factor);
  }
};

// V''ᵀ of sixteen keys, as a product takes it from registers: values as they came (this warp's sixteen columns of them
// at `from`, transposed on the way), times what their keys' roots say.
template <class C>
__device__ __forceinline__ void scaled_values(uint32_t (&to)[4], uint32_t from, const float* roots) {
  const int t = threadIdx.x % 4;
  uint32_t raw[4];
  load_transposed(raw, from);
  const float2 low = *reinterpret_cast<const float2*>(&roots[2 * t]);
  const float2 high = *reinterpret_cast<const float2*>(&roots[8 + 2 * t]);
  const auto scaled = [](uint32_t pair, float2 by) {
    const float2 v = widen_pair<C::kBf16>(pair);
    return to_half_pair(v.x * by.x, v.y * by.y);
  };
  to[0] = scaled(raw[0], low), to[1] = scaled(raw[2], low), to[2] = scaled(raw[1], high), to[3] = scaled(raw[3], high);
}

template <class C, int kWarpgroup>
__device__ __forceinline__ void multiply(Shared<C>& s, const Params& p) {
  Accumulators<C, kWarpgroup> acc;
  define(acc.values);
  define(acc.keys);
  uint32_t stage = 0, parity = 0;
  int acc_max = 0, partial_max = 0, tiles = 0;
  bool fresh = true;
  // Of a tile of sixteen values, where this lane finds its part of this warp's columns.
  const uint32_t own =
      kWarpgroup * kWarpKeys * 128 + raw_offset(threadIdx.x % 16, threadIdx.x % 128 / 32 * 2 + threadIdx.x % 32 / 16);
  for (;;) {
    s.full[stage].wait(parity);
    const TileHead& head = s.head[stage];
    const int flags = head.flags, partial_index = head.partial;
    if (flags & kStop) break;
    if (flags & kFresh) fresh = true, tiles = 0;
    const detail::Operand part(s.stage[stage], C::kPartBytes);
    if (tiles == 0) acc_max = head.max[0];
    const bool same =
        ((head.max[0] ^ acc_max) | (head.max[1] ^ acc_max) | (head.max[2] ^ acc_max) | (head.max[3] ^ acc_max)) == 0;
    if (same) {
      mma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) acc.multiply_keys(part, k, k > 0 || tiles > 0);
      mma_commit();
      uint32_t values[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) scaled_values<C>(values[k], head.values[k] + own, &s.value_root[stage][16 * k]);
      mma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) acc.multiply_values(values[k], part, k, k > 0 || tiles > 0);
      mma_commit();
      mma_wait<0>();
      acc.pin_all();
    } else {
      // Sixteen keys relative to another maximum: the sums follow, exactly.
#pragma unroll 1
      for (int k = 0; k < 4; ++k) {
        const int max = head.max[k];
        if (acc_max - max > 20) continue;  // weights of less than 2^-34 of those in the sums
        if (max != acc_max) acc.scale(four_to(acc_max - max));
        acc_max = max;
        acc.pin_all();
        uint32_t values[4];
        scaled_values<C>(values, head.values[k] + own, &s.value_root[stage][16 * k]);
        mma_fence();
        acc.multiply_keys(part, k, k > 0 || tiles > 0);
        acc.multiply_values(values, part, k, k > 0 || tiles > 0);
        mma_commit();
        mma_wait<0>();
        acc.pin_all();
      }
    }
    s.empty[stage].arrive_for_warp();
    ++tiles;
    if (tiles == kRestart || (flags & kEnd)) {
      if (!acc.finite()) s.overflow = 1;
      float* const partial = p.partials + int64_t{partial_index} * partial_floats(C::kDim);
      acc.add_to(partial + partial_matrix(C::kDim), fresh, acc_max, partial_max);
      fresh = false;
      tiles = 0;
      if (flags & kEnd) {
        if (threadIdx.x % 128 == 0) reinterpret_cast<PartialHead*>(partial)->matrix_max[kWarpgroup] = partial_max;
        __syncwarp();
        s.finished.arrive_for_warp();
      }
    }
    stage = stage + 1 == C::kConverterWarpgroups ? 0 : stage + 1;
    parity ^= stage == 0;
  }
}

}  // namespace lla::cuda::sm90::decode
