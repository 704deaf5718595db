// What the floating types of tensors can hold.
#pragma once

#include <cmath>
#include <limits>
#include <stdexcept>

#include "lla/lla.hpp"

namespace lla::test {

struct FloatRange {
  double largest;          // finite number
  double smallest_normal;  // and half a unit below it the subnormal numbers are off
  double smallest;         // subnormal number
};

inline FloatRange range_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return {std::numeric_limits<double>::max(), std::numeric_limits<double>::min(),
              std::numeric_limits<double>::denorm_min()};
    case DType::f32: return {0x1.fffffep127, 0x1p-126, 0x1p-149};
    case DType::bf16: return {0x1.fep127, 0x1p-126, 0x1p-133};
    case DType::f16: return {65504, 0x1p-14, 0x1p-24};
    default: throw std::invalid_argument("not a floating type");
  }
}

}  // namespace lla::test
