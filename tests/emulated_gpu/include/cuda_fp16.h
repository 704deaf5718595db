#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half h) {
  _Float16 x;
  std::memcpy(&x, &h.bits, 2);
  return static_cast<float>(x);
}
inline __half __float2half_rn(float x) {
  const _Float16 rounded = static_cast<_Float16>(x);
  __half h;
  std::memcpy(&h.bits, &rounded, 2);
  return h;
}
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline float __high2float(__half2 h) { return __half2float(h.y); }
inline __half2 __hmul2(__half2 a, __half2 b) {  // products are exact in float
  return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}
inline __half2 __hmax2(__half2 a, __half2 b) {
  return __floats2half2_rn(fmaxf(__half2float(a.x), __half2float(b.x)), fmaxf(__half2float(a.y), __half2float(b.y)));
}
inline __half2 __habs2(__half2 a) {
  return {{static_cast<uint16_t>(a.x.bits & 0x7fff)}, {static_cast<uint16_t>(a.y.bits & 0x7fff)}};
}
