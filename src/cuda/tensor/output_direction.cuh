// x as the direction of the output pass, where U = W (1 + x·(k - mean)).
#pragma once

#include "cuda/tensor/block.cuh"
#include "cuda/tensor/cg.cuh"

namespace lla::cuda::tensor {

// x, rounded to fp16 with a power of two per row, as the words a product takes, and with kLow what rounding left over
// in the tile `low`; |x|² and x·mean of what is kept.
template <int kDim, bool kLow>
__device__ __forceinline__ void round_rows(uint32_t (&words)[kDim / 4], const float (&x)[kDim / 2],
                                           const float (&mean)[kDim / 2], const Pair<float>& scale, __half* low,
                                           const Lane& lane, Pair<float>& squares, Pair<float>& dots) {
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int r = i & 1;
    const float a = x[2 * i] * scale[r], b = x[2 * i + 1] * scale[r];
    words[i] = pack(a, b);
    float2 rounded = unpack(words[i]);
    if constexpr (kLow) {
      const uint32_t low_word = pack(a - rounded.x, b - rounded.y);
      const float2 rounded_low = unpack(low_word);
      tile_word<uint32_t>(low, lane.tile_offset(i / 2, r)) = low_word;
      rounded.x += rounded_low.x;
      rounded.y += rounded_low.y;
    }
    squares[r] += rounded.x * rounded.x + rounded.y * rounded.y;
    dots[r] += rounded.x * mean[2 * i] + rounded.y * mean[2 * i + 1];
  }
}

// `with_low`: the low part is wanted, too. `one`: what 1 is in units of U / W.
template <int kDim>
__device__ __forceinline__ void make_output_direction(uint32_t (&words)[kDim / 4], const float (&x)[kDim / 2],
                                                      const float (&mean)[kDim / 2], __half* low, bool with_low,
                                                      const Lane& lane, const HeadScales& head, const Pair<int>& loose,
                                                      Direction& d, Pair<float>& one) {
  Pair<float> scale, dots = {0, 0}, squares = {0, 0};
  scale_rows<kDim>(scale, x);
  if (with_low) {
    round_rows<kDim, true>(words, x, mean, scale, low, lane, squares, dots);
  } else {
    round_rows<kDim, false>(words, x, mean, scale, low, lane, squares, dots);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // 1 in units of the products of fp16 numbers, which stay below 2^38: more than 2^60 of them is as good as infinite.
    one[r] = fminf(scale[r], 0x1p60f);
    const float bound = fmaf(2.001f * head.key_norm, sqrtf(quad_sum(squares[r])), one[r]);
    d.scale[r] = power_of_two_below(bound) * small_power(loose[r]);
    d.centre[r] = (quad_sum(dots[r]) - one[r]) * d.scale[r];
    one[r] *= d.scale[r];
  }
}

}  // namespace lla::cuda::tensor
