// The consumer warpgroups: V''ᵀ [K'' | r] and K''ᵀ [K'' | r], without the block that is known by symmetry.
#pragma once

#include "cuda/sm90/decode/shared.cuh"
#include "cuda/sm90/mma.cuh"

namespace lla::cuda::sm90::decode {

template <int kColumns>
struct OuterProduct;
template <>
struct OuterProduct<72> {
  using Atom = cute::SM90::GMMA::MMA_64x72x16_F32F16F16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>;
};
template <>
struct OuterProduct<136> {
  using Atom = cute::SM90::GMMA::MMA_64x136x16_F32F16F16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>;
};

__device__ __forceinline__ void add_to_global(float4* at, float4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Adds the accumulators to the partial's matrix, which is relative to the maximum `partial_max`.
template <int kCount>
__device__ __forceinline__ void flush(float4* to, float (&acc)[kCount], bool first, int acc_max, int& partial_max) {
  const int thread = threadIdx.x % 128;
  if (first) partial_max = acc_max;
  if (!first && acc_max > partial_max + 40) {  // too far to scale what is new
    const float factor = four_to(partial_max - acc_max);
    for (int i = 0; i < kCount / 4; ++i) {
      float4& at = to[i * 128 + thread];
      const float4 v = at;
      at = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    }
    partial_max = acc_max;
  }
  const float factor = four_to(acc_max - partial_max);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 v{acc[4 * i] * factor, acc[4 * i + 1] * factor, acc[4 * i + 2] * factor, acc[4 * i + 3] * factor};
    if (first) {
      to[i * 128 + thread] = v;
    } else {
      add_to_global(&to[i * 128 + thread], v);
    }
  }
}

// What a warpgroup multiplies: values' rows 64 kWarpgroup .. times all keys, and, at head dimension 128, warpgroup 0
// the second block of keys' rows, 1 the first.
template <class C, int kWarpgroup>
struct Accumulators {
  static constexpr int kKeyBlock = C::kDim == 64 ? 0 : 1 - kWarpgroup;
  static constexpr int kKeyParts = C::kKeyParts - kKeyBlock;  // of its columns
  static constexpr int kValueColumns = C::kDim + 8, kKeyColumns = 64 * kKeyParts + 8;
  using ValueAtom = typename OuterProduct<kValueColumns>::Atom;
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
  __device__ __forceinline__ void multiply(const detail::Operand& stage, int k, bool add) {
    constexpr int kPart = C::kPartBytes / 16;
    const auto out = add ? detail::ScaleOut::One : detail::ScaleOut::Zero;
    detail::issue_ss<ValueAtom>(values, stage.at(k * 128 + (C::kValuePart + kWarpgroup) * kPart), stage.at(k * 128),
                                out, std::make_index_sequence<kValueColumns / 2>{});
    const uint64_t from = stage.at(k * 128 + kKeyBlock * kPart);
    detail::issue_ss<KeyAtom>(keys, from, from, out, std::make_index_sequence<kKeyColumns / 2>{});
  }
  __device__ __forceinline__ void add_to(float* matrix, bool fresh, int acc_max, int& partial_max) {
    int second_max = partial_max;
    flush(reinterpret_cast<float4*>(matrix + value_tile(C::kDim, kWarpgroup).from), values, fresh, acc_max,
          partial_max);
    flush(reinterpret_cast<float4*>(matrix + key_tile(C::kDim, kKeyBlock).from), keys, fresh, acc_max, second_max);
  }
};

template <class C, int kWarpgroup>
__device__ __forceinline__ void multiply(Shared<C>& s, const Params& p) {
  Accumulators<C, kWarpgroup> acc;
  define(acc.values);
  define(acc.keys);
  uint32_t stage = 0, parity = 0;
  int acc_max = 0, partial_max = 0, tiles = 0;
  bool fresh = true;
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
      for (int k = 0; k < 4; ++k) acc.multiply(part, k, k > 0 || tiles > 0);
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
        mma_fence();
        acc.multiply(part, k, k > 0 || tiles > 0);
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
