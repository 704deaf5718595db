// The multiplying warpgroups: K''ᵀ [K'' | V''], K''ᵀ r and V''ᵀ r, from the stages as the converting warps left them.
//
// Rows of a product are columns of the keys. At head dimension 128 each warpgroup has 64 of them, the second without the
// block that is known by symmetry.
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
LLA_OUTER_PRODUCT(8)
LLA_OUTER_PRODUCT(128)
LLA_OUTER_PRODUCT(192)
#undef LLA_OUTER_PRODUCT

// Eight columns, 16 bytes a key, one key behind the other.
struct RootOperand {
  uint32_t low;

  __device__ __forceinline__ explicit RootOperand(const void* roots) : low((shared_address(roots) >> 4) | 8u << 16) {
    asm volatile("" : "+r"(low));
  }
  __device__ __forceinline__ uint64_t at(int step) const {  // of sixteen keys
    constexpr uint32_t kHigh = 8;                           // 8 keys are 128 bytes; no swizzle
    return static_cast<uint64_t>(kHigh) << 32 | (low + step * 16);
  }
};

// red.v4: L2 adds behind the warp's back.
template <bool kAdd>
__device__ __forceinline__ void put_four(float4* at, float4 v) {
  if constexpr (kAdd) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
  } else {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
  }
}

// With the lane of the next (or last) row.
__device__ __forceinline__ float swap_rows(float x) {
  float y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, 4, 31, 0xffffffff;" : "=f"(y) : "f"(x));
  return y;
}

// kRowBlock: of 64 rows.
template <class C, int kRowBlock>
struct Accumulators {
  static constexpr int kKeyColumns = C::kDim - 64 * kRowBlock, kColumns = kKeyColumns + C::kDim;
  static constexpr int kCount = kColumns / 2;
  static constexpr bool kTwo = kColumns > 192;  // no kernel of this many threads can have all in one product
  using Atom = typename OuterProduct<kTwo ? C::kDim : kColumns>::Atom;
  using SumAtom = OuterProduct<8>::Atom;
  float products[kCount], key_sum[4], value_sum[4];

  __device__ __forceinline__ void define_all() { define(products), define(key_sum), define(value_sum); }
  __device__ __forceinline__ void pin_all() { pin(products), pin(key_sum), pin(value_sum); }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& x : products) x *= factor;
#pragma unroll
    for (float& x : key_sum) x *= factor;
#pragma unroll
    for (float& x : value_sum) x *= factor;
  }
  __device__ __forceinline__ bool finite() const {
    float sum = 0;  // 0 times what is not finite is NaN
#pragma unroll
    for (const float x : products) sum = fmaf(x, 0.0f, sum);
#pragma unroll
    for (const float x : key_sum) sum = fmaf(x, 0.0f, sum);
#pragma unroll
    for (const float x : value_sum) sum = fmaf(x, 0.0f, sum);
    return sum == 0;
  }
  template <int kFrom, size_t... kIndex>
  __device__ __forceinline__ void issue(uint64_t a, uint64_t b, detail::ScaleOut out, std::index_sequence<kIndex...>) {
    Atom::fma(a, b, products[kFrom + kIndex]..., out);
  }
  // Sixteen keys.
  __device__ __forceinline__ void multiply(const detail::Operand& stage, const RootOperand& roots, int k, bool add) {
    constexpr int kPart = C::kPartBytes / 16;
    const auto out = add ? detail::ScaleOut::One : detail::ScaleOut::Zero;
    const uint64_t keys = stage.at(k * 128 + kRowBlock * kPart);
    const uint64_t values = stage.at(k * 128 + (C::kParts + kRowBlock) * kPart);
    constexpr std::make_index_sequence<kTwo ? kCount / 2 : kCount> kRange;
    issue<0>(keys, keys, out, kRange);
    if constexpr (kTwo) issue<kCount / 2>(keys, stage.at(k * 128 + C::kParts * kPart), out, kRange);
    detail::issue_ss<SumAtom>(key_sum, keys, roots.at(k), out, std::make_index_sequence<4>{});
    detail::issue_ss<SumAtom>(value_sum, values, roots.at(k), out, std::make_index_sequence<4>{});
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
  // Every address is one of two and a constant.
  template <bool kAdd>
  __device__ __forceinline__ void put(float* matrix, float by) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    constexpr ProductTile kKeys = key_tile(C::kDim, kRowBlock), kOwnValues = value_tile(C::kDim, kRowBlock);
    const auto four = [&](float a, float b, float c, float d) { return float4{a * by, b * by, c * by, d * by}; };
    float4* const own = reinterpret_cast<float4*>(matrix) + thread;
#pragma unroll
    for (int q = 0; q < kKeyColumns / 8; ++q) {
      const float* const x = &products[4 * q];
      put_four<kAdd>(own + kKeys.from / 4 + q * 128, four(x[0], x[1], x[2], x[3]));
    }
    put_four<kAdd>(own + kKeys.from / 4 + kKeys.quads * 128, four(key_sum[0], key_sum[1], key_sum[2], key_sum[3]));
    put_four<kAdd>(own + kOwnValues.from / 4 + kOwnValues.quads * 128,
                   four(value_sum[0], value_sum[1], value_sum[2], value_sum[3]));
    // The values' products have values as rows: neighbouring rows exchange columns. This lane: columns 2 t + odd and 8
    // more of sixteen values, keys of an even row and the next.
    const bool odd = lane / 4 % 2;
    float4* const values = reinterpret_cast<float4*>(matrix) + value_quad(warp, 0) * 128 + value_place(0, lane);
    constexpr int kAtOnce = 8;  // exchanges on their way
#pragma unroll
    for (int first = 0; first < C::kDim / 8; first += kAtOnce / 2) {
      float from[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const x = &products[kKeyColumns / 2 + 4 * (first + i) + 2 * half];
          from[2 * i + half][0] = swap_rows(odd ? x[0] : x[1]);
          from[2 * i + half][1] = odd ? x[1] : x[0];
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; i += 2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float(&x)[2] = from[2 * i + half], (&y)[2] = from[2 * i + 2 + half];
          const int q = first + i;
          put_four<kAdd>(values + value_tile(C::kDim, q / 8).from / 4 + half * 128 + q / 2 % 4 * 32,
                         four(odd ? x[0] : x[1], odd ? x[1] : x[0], odd ? y[0] : y[1], odd ? y[1] : y[0]));
        }
      }
    }
  }
  __device__ __forceinline__ static int value_quad(int warp, int half) { return 8 * kRowBlock + 2 * warp + half; }
  __device__ __forceinline__ static int value_place(int strip, int lane) {
    return strip * 32 + (2 * (lane % 4) + lane / 4 % 2) * 4 + lane / 8;
  }

  // What this thread has added to, by a factor.
  __device__ __forceinline__ static void rescale(float* matrix, float factor) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const auto scale = [&](const ProductTile& block, int quad, int there) {
      float4& at = *(reinterpret_cast<float4*>(matrix + block.from) + quad * 128 + there);
      const float4 v = at;
      at = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    };
#pragma unroll 1
    for (int q = 0; q <= kKeyColumns / 8; ++q) scale(key_tile(C::kDim, kRowBlock), q, thread);
    scale(value_tile(C::kDim, kRowBlock), value_tile(C::kDim, kRowBlock).quads, thread);
#pragma unroll 1
    for (int q = 0; q < C::kDim / 8; ++q) {
      scale(value_tile(C::kDim, q / 8), value_quad(warp, q % 2), value_place(q / 2 % 4, lane));
    }
  }
};

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
      restart = kRowBlock == 0 ? C::kRestart : C::kRestart / 2;
    }
    if (stages == 0) acc_max = maxima[0];
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
        const detail::Operand operand(s.stage[stage], C::kPartBytes);
        const RootOperand roots(s.root[stage]);
        mma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) acc.multiply(operand, roots, k, k > 0 || stages > 0);
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
      const detail::Operand operand(s.stage[stage], C::kPartBytes);
      const RootOperand roots(s.root[stage]);
#pragma unroll 1
      for (int piece = 0; piece < (end ? 1 : C::kPieces); ++piece) {
        const int max = piece == 0 ? maxima[0] : maxima[1];
        if (acc_max - max > 20) continue;  // weights of less than 2^-34 of those in the sums
        if (max != acc_max) acc.scale(four_to(acc_max - max));
        acc_max = max;
        acc.pin_all();
        mma_fence();
#pragma unroll
        for (int k = 0; k < kPieceSteps; ++k) {
          acc.multiply(operand, roots, piece * kPieceSteps + k, k > 0 || piece > 0 || stages > 0);
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
