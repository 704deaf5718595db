// Rows of the caller's tensors, any storage type and stride, to and from dense rows of the arithmetic type.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/convert.hpp"
#include "core/problem.hpp"

namespace lla::cpu {

constexpr int64_t kMaxChannels = 256;

template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// Ordered like magnitudes; Inf and NaN come last.
template <class T>
Bits<T> magnitude_bits(T x) {
  return std::bit_cast<Bits<T>>(x) & (~Bits<T>{0} >> 1);
}

template <class T>
Bits<T> infinity_bits() {
  return magnitude_bits(std::numeric_limits<T>::infinity());
}

// Magnitude from which a key counts as not finite, because its products would overflow: 2^56 in float, 2^500 in double.
template <class T>
Bits<T> huge_bits() {
  return magnitude_bits(static_cast<T>(sizeof(T) == 8 ? 0x1p500 : 0x1p56));
}

// Of a row without an element that is neither zero nor infinite: below every other.
constexpr int32_t kNoExponent = std::numeric_limits<int32_t>::min() / 2;

// Of the largest of `count` elements, `stride` apart: 2^exponent <= its magnitude < 2^(exponent + 1).
template <class T>
int32_t largest_exponent(const T* row, int64_t count, int64_t stride = 1) {
  T largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(row[i * stride]));
  return largest > 0 && std::isfinite(largest) ? std::ilogb(largest) : kNoExponent;
}

// x 2^exponent, also where the power alone is out of the type's range; too large is infinite.
template <class T>
class PowerOfTwo {
 public:
  explicit PowerOfTwo(int32_t exponent) {
    const int32_t within = std::clamp(exponent, -2 * kLargest, 2 * kLargest);
    first_ = power(within / 2);
    second_ = power(within - within / 2);
  }
  T operator()(T x) const { return x * first_ * second_; }

 private:
  static constexpr int32_t kLargest = std::numeric_limits<T>::max_exponent - 2;  // of a power that has a reciprocal
  static T power(int32_t exponent) {
    const auto biased = static_cast<Bits<T>>(exponent + std::numeric_limits<T>::max_exponent - 1);
    return std::bit_cast<T>(biased << (std::numeric_limits<T>::digits - 1));
  }
  T first_, second_;
};

namespace detail {

template <class T, class Stored>
T convert(Stored x) {
  if constexpr (std::is_same_v<Stored, float> || std::is_same_v<Stored, double>) {
    return static_cast<T>(x);
  } else {
    return static_cast<T>(core::to_float(x));
  }
}

template <class T, class Stored>
Bits<T> read(const Stored* from, int64_t stride, int64_t count, T* to) {
  Bits<T> largest = 0;
  const auto take = [&](int64_t i, Stored value) {
    to[i] = convert<T>(value);
    const Bits<T> bits = magnitude_bits(to[i]);
    largest = bits > largest ? bits : largest;
  };
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) take(i, from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) take(i, from[i * stride]);
  }
  return largest;
}

}  // namespace detail

inline int64_t row_offset(const core::Operand& t, int64_t batch, int64_t position, int64_t head) {
  return batch * t.stride[0] + position * t.stride[1] + head * t.stride[2];
}

// Reads one row and returns the bits of its largest magnitude.
template <class T>
Bits<T> read_row(const core::Operand& t, int64_t offset, int64_t count, T* to) {
  const int64_t stride = t.stride[3];
  switch (t.dtype) {
    case DType::f32: return detail::read(static_cast<const float*>(t.data) + offset, stride, count, to);
    case DType::f64: return detail::read(static_cast<const double*>(t.data) + offset, stride, count, to);
    case DType::bf16: return detail::read(static_cast<const core::bf16*>(t.data) + offset, stride, count, to);
    case DType::f16: return detail::read(static_cast<const core::f16*>(t.data) + offset, stride, count, to);
    default: return infinity_bits<T>();
  }
}

template <class T>
void write_row(const core::Operand& t, int64_t offset, int64_t count, const T* from) {
  const int64_t stride = t.stride[3];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = offset + i * stride;
    switch (t.dtype) {
      case DType::f32: static_cast<float*>(t.data)[at] = static_cast<float>(from[i]); break;
      case DType::f64: static_cast<double*>(t.data)[at] = from[i]; break;
      case DType::bf16: static_cast<core::bf16*>(t.data)[at] = core::to_bf16(static_cast<float>(from[i])); break;
      case DType::f16: static_cast<core::f16*>(t.data)[at] = core::to_f16(static_cast<float>(from[i])); break;
      default: break;
    }
  }
}

template <class T>
void fill_row(const core::Operand& t, int64_t offset, int64_t count, T value) {
  T row[kMaxChannels];
  for (int64_t i = 0; i < count; ++i) row[i] = value;
  write_row(t, offset, count, row);
}

}  // namespace lla::cpu
