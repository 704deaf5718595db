// The multiplying warpgroups: [K'' | V'']ᵀ [K'' | r], from the stages as the converting warps left them.
//
// Each warpgroup has 64 columns of the keys and 64 of the values as the rows of its products; at head dimension 128 the
// second leaves out the block that is known by symmetry. The roots are eight more columns on the right, so that sums over
// the keys cost no products of their own, each of which would read its left operand again.
#pragma once

#include "cuda/sm90/decode/stages.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/tensor/fragment.cuh"

namespace lla::cuda::sm90::decode {

template <int kColumns>
struct OuterProduct;
#define LLA_OUTER_PRODUCT(N)                                                                                      \
  template <>                                                                                                     \
  struct OuterProduct<N> {                                                                                        \
    using Atom =                                                                                                  \
        cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>; \
  };
LLA_OUTER_PRODUCT(72)
LLA_OUTER_PRODUCT(136)
#undef LLA_OUTER_PRODUCT

template <bool kAdd>
__device__ __forceinline__ void put_four(float4* at, float4 v) {
  kAdd ? add_four(at, v) : store_four(at, v);
}

// kRowBlock: of 64 rows.
template <class C, int kRowBlock>
struct Accumulators {
  static constexpr int kKeyColumns = C::kDim - 64 * kRowBlock + 8, kValueColumns = C::kDim + 8;  // with the sums
  // Whose maximum the sums are relative to: the warpgroups put theirs away at different times.
  static_assert(key_tile(C::kDim, kRowBlock).warpgroup == kRowBlock);
  static_assert(value_tile(C::kDim, kRowBlock).warpgroup == kRowBlock);
  using KeyAtom = typename OuterProduct<kKeyColumns>::Atom;
  using ValueAtom = typename OuterProduct<kValueColumns>::Atom;
  float keys[kKeyColumns / 2], values[kValueColumns / 2];

  __device__ __forceinline__ void define_all() { define(keys), define(values); }
  __device__ __forceinline__ void pin_all() { pin(keys), pin(values); }
  template <class Function>
  __device__ __forceinline__ void for_each(const Function& function) {
#pragma unroll
    for (float& x : keys) function(x);
#pragma unroll
    for (float& x : values) function(x);
  }
  __device__ __forceinline__ void scale(float factor) {
    for_each([&](float& x) { x *= factor; });
  }
  __device__ __forceinline__ bool finite() {
    float sum = 0;  // 0 times what is not finite is NaN
    for_each([&](float& x) { sum = fmaf(x, 0.0f, sum); });
    return sum == 0;
  }
  // Sixteen keys. What is behind the last 64 columns of `stage`, as far as these are behind those before, are the roots.
  __device__ __forceinline__ void multiply(const detail::Operand& stage, int k, bool add) {
    constexpr int kPart = C::kPartBytes / 16;
    const auto out = add ? detail::ScaleOut::One : detail::ScaleOut::Zero;
    const uint64_t own_keys = stage.at(k * 128 + kRowBlock * kPart);
    const uint64_t own_values = stage.at(k * 128 + C::kValues / 16 + kRowBlock * kPart);
    detail::issue_ss<KeyAtom>(keys, own_keys, own_keys, out, std::make_index_sequence<kKeyColumns / 2>{});
    detail::issue_ss<ValueAtom>(values, own_values, stage.at(k * 128), out,
                                std::make_index_sequence<kValueColumns / 2>{});
  }

  // Adds the sums to the partial's, which are relative to the maximum `partial_max`.
  __device__ __forceinline__ void add_to(float* matrix, bool first, int acc_max, int& partial_max) {
    if (first) {
      partial_max = acc_max;
    } else if (acc_max > partial_max + 40) {  // too far to scale what is new
      rescale(matrix, four_to(partial_max - acc_max));
      partial_max = acc_max;
    }
    const float by = four_to(acc_max - partial_max);
    if (first) {
      put<false>(matrix, by);
    } else {
      put<true>(matrix, by);
    }
  }
  // A thread's four of every eight columns lie together: its addresses are one of two and a constant.
  __device__ __forceinline__ static float4* own_keys(float* matrix) {
    return reinterpret_cast<float4*>(matrix + key_tile(C::kDim, kRowBlock).from) + threadIdx.x % 128;
  }
  __device__ __forceinline__ static float4* own_values(float* matrix) {
    return reinterpret_cast<float4*>(matrix + value_tile(C::kDim, kRowBlock).from) + threadIdx.x % 128;
  }
  template <bool kAdd>
  __device__ __forceinline__ void put(float* matrix, float by) const {
    const auto put_all = [&](float4* to, const auto& x) {
#pragma unroll
      for (int q = 0; q < static_cast<int>(sizeof(x) / sizeof(float4)); ++q) {
        put_four<kAdd>(to + q * 128, {x[4 * q] * by, x[4 * q + 1] * by, x[4 * q + 2] * by, x[4 * q + 3] * by});
      }
    };
    put_all(own_keys(matrix), keys);
    put_all(own_values(matrix), values);
  }
  // What this thread has added to, by a factor.
  __device__ __forceinline__ static void rescale(float* matrix, float factor) {
    const auto scale_all = [&](float4* at, int quads) {
#pragma unroll 1
      for (int q = 0; q < quads; ++q) {
        const float4 v = at[q * 128];
        at[q * 128] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
      }
    };
    scale_all(own_keys(matrix), kKeyColumns / 8);
    scale_all(own_values(matrix), kValueColumns / 8);
  }
};

// Whether a warp finds something that is not finite in its share of a piece, which says so though it does not count.
template <class C>
__device__ __forceinline__ bool poisoned(const unsigned char* piece) {
  bool found = false;
#pragma unroll 1
  for (int part = 0; part < 2 * C::kParts; ++part) {
    const unsigned char* const rows = piece + part % C::kParts * C::kPartBytes + (part < C::kParts ? 0 : C::kValues);
#pragma unroll 1
    for (int word = threadIdx.x % 128; word < C::kPieceKeys * 32; word += 128) {
      const uint32_t exponents = reinterpret_cast<const uint32_t*>(rows)[word] & 0x7c007c00;
      found |= (exponents & 0xffff) == 0x7c00 || exponents >> 16 == 0x7c00;
    }
  }
  return __any_sync(0xffffffffu, found);
}

template <class C, int kRowBlock>
__device__ __forceinline__ void multiply_stages(Shared<C>& s, const Params& p) {
  constexpr int kSteps = C::kStageKeys / 16, kPieceSteps = kSteps / C::kPieces;
  Accumulators<C, kRowBlock> acc;
  acc.define_all();
  uint32_t stage = 0, parity = 0;
  int acc_max = 0, partial_max = 0, stages = 0;
  bool fresh = true, bad = false;
  // Warpgroups add to the partial in turn, so that one has the tensor cores while the other does.
  int restart = C::kRestart;
  int flags, maxima[2], partial_index;
  const auto next_stage = [&] {
    s.full[stage].wait(parity);
    const StageHead head = s.head[stage];
    flags = uniform(head.flags), maxima[0] = head.max[0], maxima[1] = head.max[1], partial_index = head.partial;
    if (flags & kUnitBegins) {
      fresh = true, bad = false, stages = 0;
      restart = kRowBlock == 0 || (flags & kUnitIsShort) ? C::kRestart : C::kRestart / 2;
    }
    if (stages == 0) acc_max = maxima[0];
  };
  const auto operand_of = [&](int stage) {
    return detail::Operand(s.stage[stage], Roots<C>(s, stage).distance(s.stage[stage]));
  };
  const auto move_on = [&] {
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  };
  const auto plain = [&] {
    return ((maxima[0] ^ acc_max) | (maxima[1] ^ acc_max) | (flags & (kUnitEnds | kNothing | kStop))) == 0;
  };
  next_stage();
#pragma unroll 1
  while (!(flags & kStop)) {
    const bool end = flags & kUnitEnds;
    float* const partial = p.partials + int64_t{partial_index} * partial_floats(C::kDim);
    uint32_t last = stage;
    if (plain()) {
      // The products of a stage begin before those of the one before have ended.
      int before = -1;
#pragma unroll 1
      for (;;) {
        const detail::Operand operand = operand_of(stage);
        mma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) acc.multiply(operand, k, k > 0 || stages > 0);
        mma_commit();
        mma_wait<1>();
        if (before >= 0) s.empty[before].arrive_for_warp();
        before = stage;
        move_on();
        if (++stages == restart) break;
        next_stage();
        if (!plain()) break;
      }
      mma_wait<0>();
      acc.pin_all();
      s.empty[before].arrive_for_warp();
      if (stages < restart) continue;
    } else if (flags & kNothing) {
      s.empty[stage].arrive_for_warp();
      move_on();
      next_stage();
      continue;
    } else {
      // Keys relative to another maximum: the sums follow, exactly.
      const detail::Operand operand = operand_of(stage);
#pragma unroll 1
      for (int piece = 0; piece < (end ? 1 : C::kPieces); ++piece) {
        const int max = piece == 0 ? maxima[0] : maxima[1];
        if (acc_max - max > 20) {  // weights of less than 2^-34 of those in the sums
          if (poisoned<C>(s.stage[stage] + piece * C::kPieceKeys * 128)) acc.scale(NAN);
          continue;
        }
        if (max != acc_max) acc.scale(four_to(acc_max - max));
        acc_max = max;
        acc.pin_all();
        mma_fence();
#pragma unroll
        for (int k = 0; k < kPieceSteps; ++k) {
          acc.multiply(operand, piece * kPieceSteps + k, k > 0 || piece > 0 || stages > 0);
        }
        mma_commit();
        mma_wait<0>();
        acc.pin_all();
      }
      if (!end) s.empty[stage].arrive_for_warp();
      move_on();
      if (++stages < restart && !end) {
        next_stage();
        continue;
      }
    }
    bad |= !acc.finite();
    acc.add_to(partial + partial_matrix(C::kDim), fresh, acc_max, partial_max);
    fresh = false;
    stages = 0, restart = C::kRestart;
    if (end) {
      const bool any = named_any(kMultiplierBarrier + kRowBlock, 128, bad);
      if (threadIdx.x % 128 == 0) {
        PartialHead& to = *reinterpret_cast<PartialHead*>(partial);
        to.matrix_max[kRowBlock] = partial_max;
        if (C::kDim == 64) to.matrix_max[1] = partial_max;
        to.again[kRowBlock] = any;
        if (any) s.overflow = 1;
      }
      __syncwarp();
      s.empty[last].arrive_for_warp();  // the unit is in its partial
    }
    next_stage();
  }
}

}  // namespace lla::cuda::sm90::decode
