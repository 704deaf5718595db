// Scalar conversions between the storage types and float or double: round to nearest even, NaN stays NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "lla/lla.hpp"

namespace lla::core {

// Magnitudes beyond it are stored as infinity.
inline double largest_finite(DType dtype) {
  switch (dtype) {
    case DType::f64: return std::numeric_limits<double>::max();
    case DType::f16: return 65519;  // rounds to 65504
    default: return static_cast<double>(std::numeric_limits<float>::max());
  }
}

// Storage only; arithmetic is done in float or double.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

constexpr float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

constexpr float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1Fu;
  const uint32_t mantissa = x.bits & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa units of 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

constexpr float to_float(float x) { return x; }

constexpr bf16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // NaN, made quiet
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

constexpr f16 to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t result = 0;
  if (magnitude > 0x7F800000u) {
    result = 0x7E00u | ((magnitude >> 13) & 0x3FFu);  // NaN, made quiet
  } else if (magnitude >= 0x477FF000u) {              // 65520 and above round to infinity
    result = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves units of 2^-24 in the low bits, rounded
    result = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    result = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | result)};
}

// The float nearest to x, except that an inexact one gets an odd last bit. Rounding it again, to a shorter type, then
// gives what rounding x itself would have given; rounding to nearest twice would not.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || !std::isfinite(x)) return nearest;
  const float towards_zero =
      std::abs(static_cast<double>(nearest)) > std::abs(x) ? std::nextafter(nearest, 0.0f) : nearest;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(towards_zero) | 1u);
}

// Element `index` of an array of a floating type, as double.
inline double load(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::f64: return static_cast<const double*>(data)[index];
    case DType::f32: return static_cast<const float*>(data)[index];
    case DType::bf16: return to_float(static_cast<const bf16*>(data)[index]);
    case DType::f16: return to_float(static_cast<const f16*>(data)[index]);
    default: return std::nan("");
  }
}

inline void store(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::f64: static_cast<double*>(data)[index] = value; break;
    case DType::f32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    case DType::bf16: static_cast<bf16*>(data)[index] = to_bf16(round_to_odd(value)); break;
    case DType::f16: static_cast<f16*>(data)[index] = to_f16(round_to_odd(value)); break;
    default: break;
  }
}

}  // namespace lla::core
