#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 h) { return __uint_as_float(static_cast<uint32_t>(h.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t word = __float_as_uint(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __habs2(__nv_bfloat162 a) {
  return {{static_cast<uint16_t>(a.x.bits & 0x7fff)}, {static_cast<uint16_t>(a.y.bits & 0x7fff)}};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(fmaxf(__bfloat162float(a.x), __bfloat162float(b.x)),
                               fmaxf(__bfloat162float(a.y), __bfloat162float(b.y)));
}
