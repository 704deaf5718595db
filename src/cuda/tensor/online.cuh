// Rows whose weights are found tile by tile: bound, sums and centre so far.
#pragma once

#include "cuda/tensor/fragment.cuh"
#include "cuda/tensor/scale.hpp"
#include "cuda/tensor/weights.cuh"

namespace lla::cuda::tensor {

// A new bound leaves the logits room to grow by this many powers of two before the next: after its first tile a row is
// hardly ever rescaled. W is then as much smaller: of its 29 bits of range 26 are left.
inline constexpr float kHeadroom = 3;
// log2 of what W must stay below.
inline constexpr float kLargestExponent = 15.99f;
// No fp16 row of x, its largest element below 2^15, is longer.
template <int kDim>
inline constexpr float kLargestX = kDim == 128 ? 0x1.6a1p18f : 0x1p18f;

__device__ __forceinline__ float exp2_of(float exponent) {
  return exponent < -126 ? 0.0f : __int_as_float((static_cast<int>(exponent) + 127) << 23);
}

// The assembler moves arithmetic behind a wait for products if nothing holds it: the (never negative) halves these
// words were united from are made where this stands.
__device__ __forceinline__ void made_here(uint32_t words) {
  if (__any_sync(0xffffffffu, (words & 0x80008000u) != 0)) __nanosleep(0);
}

struct OnlineRows {
  RowLogits logits;    // shift = 15 - R; 0 before the first key
  Pair<float> centre;  // c, times e_scale
  float e_scale;       // |E - c| e_scale is at most 1, so U fits fp16
  uint32_t unseen;     // bit r: row r has seen no key
  uint32_t fresh;      // bit r: row r saw its first keys in this tile

  __device__ __forceinline__ void start(float scale_of_e) {
#pragma unroll
    for (int r = 0; r < 2; ++r) logits.shift[r] = centre[r] = 0;
    e_scale = scale_of_e;
    unseen = 3;
    fresh = 0;
  }

  // W of a tile from its raw scores, which are used up. Returns whether a row of this warp has a new bound; then what
  // was summed before is to be multiplied by `factor`.
  template <int kKeys>
  __device__ __forceinline__ bool weigh(uint32_t (&w)[kKeys / 4], float (&scores)[kKeys / 2], Pair<float>& factor) {
    Pair<float> largest = {-INFINITY, -INFINITY};
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) {
      scores[e] = fmaf(scores[e], logits.scale[row_of(e)], logits.shift[row_of(e)]);
      largest[row_of(e)] = fmaxf(largest[row_of(e)], scores[e]);
    }
    const bool raised = __any_sync(0xffffffffu, fmaxf(largest[0], largest[1]) > kLargestExponent || unseen != 0);
    if (raised) {
      Pair<float> lower;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // A row's bound depends on that row alone, not on its neighbours in the warp.
        const float m = quad_max(largest[r]);
        const bool first = (unseen >> r & 1) && m > -INFINITY;
        const bool above = first || m > kLargestExponent;
        lower[r] = above ? kWeightExponent - kHeadroom - ceilf(m) : 0.0f;
        factor[r] = first ? 0.0f : exp2_of(lower[r]);
        if (first) fresh |= 1u << r, unseen &= ~(1u << r);
        logits.shift[r] += lower[r];
      }
#pragma unroll
      for (int e = 0; e < kKeys / 2; ++e) scores[e] += lower[row_of(e)];
    }
#pragma unroll
    for (int e = 0; e < kKeys / 2; ++e) scores[e] = exp2_fast(scores[e]);
    pack_scores<kKeys>(w, scores);
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) any |= w[i];
    made_here(any);
    return raised;
  }

  // U = fp16(W fp16(E - c)) of a tile from raw E.
  template <int kKeys>
  __device__ __forceinline__ void multiply(uint32_t (&u)[kKeys / 4], const float (&e)[kKeys / 2],
                                           const uint32_t (&w)[kKeys / 4]) {
    if (__any_sync(0xffffffffu, fresh != 0)) find_centre<kKeys>(e, w);
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const float c = centre[i & 1];
      u[i] = multiply_pairs(w[i], pack(fmaf(e[2 * i], e_scale, -c), fmaf(e[2 * i + 1], e_scale, -c)));
    }
  }

  // The same in place of E and not rounded.
  template <int kKeys>
  __device__ __forceinline__ void multiply_exactly(float (&e)[kKeys / 2], const uint32_t (&w)[kKeys / 4]) {
    if (__any_sync(0xffffffffu, fresh != 0)) find_centre<kKeys>(e, w);
    weight_scores<kKeys>(e, w, {e_scale, e_scale}, centre);
  }

  template <int kKeys>
  __device__ __forceinline__ void find_centre(const float (&e)[kKeys / 2], const uint32_t (&w)[kKeys / 4]) {
    Pair<float> total = {0, 0}, weights = {0, 0};
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const float2 weight = unpack(w[i]);
      total[i & 1] = fmaf(weight.x, e[2 * i], fmaf(weight.y, e[2 * i + 1], total[i & 1]));
      weights[i & 1] += weight.x + weight.y;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float mean = divide(quad_sum(total[r]), quad_sum(weights[r])) * e_scale;
      if (fresh >> r & 1) centre[r] = mean;
    }
    fresh = 0;
  }

  // Σ W as a sum of exp2(logit - max).
  __device__ __forceinline__ float above(float omega, int r, float max) const {
    return omega > 0 ? omega * exp2_of(-logits.shift[r] - max) : 0.0f;
  }
};

}  // namespace lla::cuda::tensor
