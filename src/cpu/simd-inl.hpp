// Vector vocabulary of the CPU kernels, compiled once per SIMD target. A panel is kVectors vectors side by side: its
// lanes are rows of the problem (queries in forward and pass A, keys in pass B of the backward), so every reduction
// over keys or channels is a plain vertical operation.
#if defined(LLA_CPU_SIMD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_SIMD_INL_HPP
#undef LLA_CPU_SIMD_INL_HPP
#else
#define LLA_CPU_SIMD_INL_HPP
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using Tag = hn::ScalableTag<T>;
template <class T>
using Vec = hn::Vec<Tag<T>>;

// Two vectors a panel: one load of a broadcast element then feeds two multiply-adds.
constexpr int kVectors = 2;
template <class T>
constexpr int64_t kLanes = HWY_LANES(T);
template <class T>
constexpr int64_t kPanel = kVectors* kLanes<T>;

template <class T>
HWY_INLINE Vec<T> splat(T x) {
  return hn::Set(Tag<T>(), x);
}
template <class T>
HWY_INLINE Vec<T> load(const T* p) {
  return hn::LoadU(Tag<T>(), p);
}
template <class T, class V>
HWY_INLINE void store(V v, T* p) {
  hn::StoreU(v, Tag<T>(), p);
}

// 2^x for x <= 0 (that is how the weights use it; up to the largest exponent it is right too). Below the smallest
// normal exponent the result is 0. x = n + f with |f| <= 1/2: a polynomial for 2^f, then n is added to the exponent
// bits.
HWY_INLINE Vec<float> exp2_lanes(Vec<float> x) {
  const Tag<float> d;
  const hn::RebindToSigned<Tag<float>> di;
  const auto lowest = splat(-126.0f);
  const auto clamped = hn::Max(x, lowest);
  const auto n = hn::Round(clamped);
  const auto f = hn::Sub(clamped, n);
  // 2^f = 1 + f q(f), q interpolated at Chebyshev points: relative error 5e-9 before rounding.
  auto q = splat(0.00015453163f);
  q = hn::MulAdd(q, f, splat(0.0013390863f));
  q = hn::MulAdd(q, f, splat(0.0096180830f));
  q = hn::MulAdd(q, f, splat(0.055503570f));
  q = hn::MulAdd(q, f, splat(0.24022651f));
  q = hn::MulAdd(q, f, splat(0.69314718f));
  const auto r = hn::MulAdd(q, f, splat(1.0f));
  const auto scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, r), hn::ShiftLeft<23>(hn::ConvertTo(di, n))));
  return hn::IfThenElseZero(hn::Ge(x, lowest), scaled);
}

HWY_INLINE Vec<double> exp2_lanes(Vec<double> x) {
  const Tag<double> d;
  const hn::RebindToSigned<Tag<double>> di;
  const auto lowest = splat(-1022.0);
  const auto clamped = hn::Max(x, lowest);
  const auto n = hn::Round(clamped);
  const auto f = hn::Sub(clamped, n);
  // Taylor coefficients ln(2)^k / k!, k = 13 ... 0: the first one left out is below 2^-57 at |f| = 1/2.
  constexpr double c[] = {1.3691488853904124e-12, 2.5678435993488196e-11,
                          4.44553827187081e-10,   7.054911620801121e-09,
                          1.0178086009239696e-07, 1.3215486790144305e-06,
                          1.5252733804059838e-05, 0.00015403530393381606,
                          0.0013333558146428441,  0.009618129107628477,
                          0.055504108664821576,   0.2402265069591007,
                          0.6931471805599453,     1.0};
  auto q = splat(c[0]);
  for (int k = 1; k < 14; ++k) q = hn::MulAdd(q, f, splat(c[k]));
  // n is an integer below 2^11 in magnitude: adding 1.5 * 2^52 leaves it in the low bits, no conversion to 64 bits
  // needed.
  const auto n_bits = hn::BitCast(di, hn::Add(n, splat(6755399441055744.0)));
  const auto scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, q), hn::ShiftLeft<52>(n_bits)));
  return hn::IfThenElseZero(hn::Ge(x, lowest), scaled);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
