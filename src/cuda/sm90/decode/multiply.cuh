// The multiplying warpgroups: K''ᵀ [K'' | V''], without the block that is known by symmetry.
#pragma once

#include "cuda/sm90/decode/shared.cuh"
#include "cuda/sm90/mma.cuh"

namespace lla::cuda::sm90::decode {

template <int kColumns>
struct OuterProduct;
template <>
struct OuterProduct<128> {
  using Atom = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>;
};
template <>
struct OuterProduct<192> {
  using Atom = cute::SM90::GMMA::MMA_64x192x16_F32F16F16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>;
};
template <>
struct OuterProduct<256> {
  using Atom = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>;
};

__device__ __forceinline__ void add_to_global(float4* at, float4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Adds the accumulators to the slot's matrix, which is relative to the maximum `slot_max`.
template <int kCount>
__device__ __forceinline__ void flush(float4* to, float (&acc)[kCount], bool first, int acc_max, int& slot_max) {
  const int thread = threadIdx.x % 128;
  if (first) slot_max = acc_max;
  if (!first && acc_max > slot_max + 40) {  // too far to scale what is new
    const float factor = four_to(slot_max - acc_max);
    for (int i = 0; i < kCount / 4; ++i) {
      float4& at = to[i * 128 + thread];
      const float4 v = at;
      at = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    }
    slot_max = acc_max;
  }
  const float factor = four_to(acc_max - slot_max);
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

// The products of sixteen keys. Warpgroup 0: keys' columns 0 to 63 times all columns; 1: 64 to 127 times all behind 63.
// (A product 256 wide would need more registers than a kernel of four warpgroups starts with: it is made in two.)
template <class C, int kGroup>
struct Accumulators {
  static constexpr bool kTwo = C::kDim == 128 && kGroup == 0;
  static constexpr int kColumns = C::kDim == 128 && kGroup == 1 ? 192 : 128;
  static constexpr int kFirst = kColumns / 2, kSecond = kTwo ? 64 : 4;
  static constexpr int kFrom = kGroup == 0 ? 0 : 64 * 256;  // floats of the slot's matrix
  using Atom = typename OuterProduct<kColumns>::Atom;
  float first[kFirst], second[kSecond];

  __device__ __forceinline__ void pin_all() {
    pin(first);
    if constexpr (kTwo) pin(second);
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kFirst; ++i) first[i] *= factor;
    if constexpr (kTwo) {
#pragma unroll
      for (int i = 0; i < kSecond; ++i) second[i] *= factor;
    }
  }
  __device__ __forceinline__ void multiply(const detail::Operand& part, int k, bool add) {
    const auto out = add ? detail::ScaleOut::One : detail::ScaleOut::Zero;
    const uint64_t left = part.at(k * 128);
    detail::issue_ss<Atom>(first, left, left, out, std::make_index_sequence<kFirst>{});
    if constexpr (kTwo) {
      detail::issue_ss<Atom>(second, left, part.at(k * 128 + 2 * C::kPartBytes / 16), out,
                             std::make_index_sequence<kSecond>{});
    }
  }
  __device__ __forceinline__ void add_to(float* matrix, bool fresh, int acc_max, int& slot_max) {
    float4* const to = reinterpret_cast<float4*>(matrix + kFrom);
    int second_max = slot_max;
    flush(to, first, fresh, acc_max, slot_max);
    if constexpr (kTwo) flush(to + kFirst / 4 * 128, second, fresh, acc_max, second_max);
  }
};

template <class C, int kGroup>
__device__ __forceinline__ void multiply(Shared<C>& s, const Params& p) {
  Accumulators<C, kGroup> acc;
  define(acc.first);
  define(acc.second);
  uint32_t stage = 0, parity = 0;
  int acc_max = 0, slot_max = 0, tiles = 0;
  bool fresh = true;
  for (;;) {
    s.full[stage].wait(parity);
    const TileHead& head = s.head[stage];
    const int flags = head.flags, slot_index = head.slot;
    if (flags & kStop) break;
    if (flags & kFresh) fresh = true, tiles = 0;
    const detail::Operand part(s.stage[stage] + kGroup * C::kPartBytes, C::kPartBytes);
    if (tiles == 0) acc_max = head.max[0];
    const bool same = ((head.max[0] ^ acc_max) | (head.max[1] ^ acc_max) | (head.max[2] ^ acc_max) |
                       (head.max[3] ^ acc_max)) == 0;
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
    if (flags & kRedo) {
      tiles = 0;
    } else if (tiles == kRestart || (flags & kEnd)) {
      float* const slot = p.slots + int64_t{slot_index} * slot_floats(C::kDim);
      acc.add_to(slot + slot_matrix(C::kDim), fresh, acc_max, slot_max);
      fresh = false;
      tiles = 0;
      if ((flags & kEnd) && threadIdx.x % 128 == 0) reinterpret_cast<SlotHead*>(slot)->matrix_max[kGroup] = slot_max;
    }
    stage ^= 1;
    parity ^= stage == 0;
  }
}

}  // namespace lla::cuda::sm90::decode
