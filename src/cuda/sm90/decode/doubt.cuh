// Which rows of a solve say BREAKDOWN because their output may be off by a hundredth by what their sums have lost. Sums in
// fp32 on tensor cores keep some twenty bits: of E = (k - mean).x they leave 2^-20 of the size of its terms undecided, the
// root of Σ (a channel's mean square, of keys as they were summed up) x², and the output shows that times the size of a
// value. The limit is from an H200 (docs/notebook/2026-11-16-hopper-decode.md).
#pragma once

namespace lla::cuda::sm90::decode {

inline constexpr float kSumNoise = 0x1p-20f;
inline constexpr float kMostNoise = 1.6e-2f;
inline constexpr float kOfTwoPasses = 1.25f;     // both have lost something
inline constexpr float kUsualOfLargest = 0.42f;  // a usual value over a usual output, from the largest of both

// A row whose largest |o| is below this is doubtful. `value`: the largest |v|, or about that.
__device__ __forceinline__ float least_output(float terms, float value) {
  return kSumNoise * kUsualOfLargest / kMostNoise * terms * value;
}

}  // namespace lla::cuda::sm90::decode
