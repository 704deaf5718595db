// Powers of two that bring a largest magnitude near fp16's upper end: exact to apply, exact to undo.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::tensor {

// The power of two s with s · largest in [2^14, 2^15); 1 for zero. Kept where s and 1/s are normal floats.
constexpr float power_of_two_scale(float largest) {
  if (!(largest > 0)) return 1;
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(largest) >> 23) - 127;  // -127 for a subnormal
  const int wanted = 14 - exponent;
  const int kept = wanted < -126 ? -126 : wanted > 126 ? 126 : wanted;
  return std::bit_cast<float>(static_cast<uint32_t>(kept + 127) << 23);
}

// The power of two s with s · bound <= 1, at most a factor 2 smaller than needed; 0 for zero.
constexpr float power_of_two_below(float bound) {
  if (!(bound > 0)) return 0;
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(bound) >> 23) - 127;
  const int wanted = -(exponent + 1);
  const int kept = wanted < -125 ? -125 : wanted > 125 ? 125 : wanted;
  return std::bit_cast<float>(static_cast<uint32_t>(kept + 127) << 23);
}

}  // namespace lla::cuda::tensor
