// Rows whose weights are found tile by tile: bound, sums and centre so far.
#pragma once

#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/scale.hpp"
#include "cuda/sm90/weights.cuh"

namespace lla::cuda::sm90 {

// A new bound leaves the logits room to grow by this many powers of two (and one more, up to 65,504) before the next: after its
// first tile a row is hardly ever rescaled. W is then as much smaller: of its 29 bits of range 26 are left.
inline constexpr float kHeadroom = 3;
// 15 - R of a row that has seen no key: any logit overflows.
inline constexpr float kNoBound = 0x1p20f;
// No fp16 row of x, its largest element below 2^15, is longer.
template <int kDim>
inline constexpr float kLargestX = kDim == 128 ? 0x1.6a1p18f : 0x1p18f;

__device__ __forceinline__ float power_of_two(float exponent) {
  return exponent < -126 ? 0.0f : __int_as_float((static_cast<int>(exponent) + 127) << 23);
}

struct OnlineRows {
  RowLogits logits;    // shift = 15 - R
  Pair<float> omega;   // Σ W, this thread's part
  Pair<float> sum;     // Σ U, rounded, likewise
  Pair<float> centre;  // c, times e_scale
  float e_scale;       // |E - c| e_scale is at most 1, so U fits fp16
  uint32_t fresh;      // bit r: row r saw its first keys in this tile

  __device__ __forceinline__ void start(float scale_of_e) {
#pragma unroll
    for (int r = 0; r < 2; ++r) logits.shift[r] = kNoBound, omega[r] = sum[r] = centre[r] = 0;
    e_scale = scale_of_e;
    fresh = 0;
  }

  // W of a tile and its row sums. An overflow makes a sum infinite: that is how a logit above the bound is noticed.
  template <int kKeys>
  __device__ __forceinline__ void exponentiate(uint32_t (&w)[kKeys / 4], Pair<float>& sums, const float (&scores)[kKeys / 2]) const {
    sums[0] = sums[1] = 0;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const int r = i & 1;
      w[i] = pack(exp2_fast(fmaf(scores[2 * i], logits.scale[r], logits.shift[r])),
                  exp2_fast(fmaf(scores[2 * i + 1], logits.scale[r], logits.shift[r])));
      const float2 rounded = unpack(w[i]);
      sums[r] += rounded.x + rounded.y;
    }
  }

  // W of a tile from its raw scores. Returns whether a row of this warp has a new bound; then what was summed before is to be
  // multiplied by `factor` (omega and sum already are).
  template <int kKeys>
  __device__ __forceinline__ bool weigh(uint32_t (&w)[kKeys / 4], const float (&scores)[kKeys / 2], Pair<float>& factor) {
    Pair<float> sums;
    exponentiate<kKeys>(w, sums, scores);
    const bool raised = __any_sync(0xffffffffu, sums[0] == INFINITY || sums[1] == INFINITY);
    if (raised) {
      Pair<float> largest = {-INFINITY, -INFINITY};
#pragma unroll
      for (int e = 0; e < kKeys / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], scores[e]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // A row's bound depends on that row alone, not on its neighbours in the warp.
        const bool above = quad_max(sums[r]) == INFINITY;
        const float shift = kWeightExponent - kHeadroom - ceilf(quad_max(largest[r]) * logits.scale[r]);
        factor[r] = above ? power_of_two(shift - logits.shift[r]) : 1.0f;
        if (above && logits.shift[r] == kNoBound) fresh |= 1u << r;
        logits.shift[r] = above ? shift : logits.shift[r];
        omega[r] *= factor[r];
        sum[r] *= factor[r];
      }
      exponentiate<kKeys>(w, sums, scores);
    }
    omega[0] += sums[0];
    omega[1] += sums[1];
    return raised;
  }

  // U = fp16(W (E - c)) of a tile from raw E.
  template <int kKeys>
  __device__ __forceinline__ void multiply(uint32_t (&u)[kKeys / 4], float (&e)[kKeys / 2], const uint32_t (&w)[kKeys / 4]) {
    if (__any_sync(0xffffffffu, fresh != 0)) find_centre<kKeys>(e, w);
    weight_scores<kKeys>(e, w, {e_scale, e_scale}, centre);
    round_scores<kKeys>(u, e, sum);
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

  // ω as the sum of exp2(logit - max); omega is by now the whole row's.
  __device__ __forceinline__ float omega_above(int r, float max) const {
    return omega[r] > 0 ? omega[r] * power_of_two(-logits.shift[r] - max) : 0.0f;
  }
};

}  // namespace lla::cuda::sm90
