#include "common/random.hpp"

#include "cpu/targets.hpp"  // before Highway

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/random.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace lla::experiments {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <int kLeft, class V>
HWY_INLINE V Rotate(V v) {
  return hn::Or(hn::ShiftLeft<kLeft>(v), hn::ShiftRight<32 - kLeft>(v));
}

// Four rounds, then the key is added: x0 += ks[a], x1 += ks[b] + injection.
template <int kR0, int kR1, int kR2, int kR3, class V>
HWY_INLINE void Rounds(V& x0, V& x1, V add0, V add1) {
  const auto round = [&](V rotated) HWY_ATTR { x1 = hn::Xor(rotated, x0); };
  x0 = hn::Add(x0, x1), round(Rotate<kR0>(x1));
  x0 = hn::Add(x0, x1), round(Rotate<kR1>(x1));
  x0 = hn::Add(x0, x1), round(Rotate<kR2>(x1));
  x0 = hn::Add(x0, x1), round(Rotate<kR3>(x1));
  x0 = hn::Add(x0, add0);
  x1 = hn::Add(x1, add1);
}

template <class D, class V>
HWY_INLINE void Threefry(D d, V& x0, V& x1, Block key) {
  const uint32_t ks[3] = {key.x0, key.x1, 0x1BD11BDAu ^ key.x0 ^ key.x1};
  const auto set = [&](uint32_t value) HWY_ATTR { return hn::Set(d, value); };
  x0 = hn::Add(x0, set(ks[0]));
  x1 = hn::Add(x1, set(ks[1]));
  Rounds<13, 15, 26, 6>(x0, x1, set(ks[1]), set(ks[2] + 1));
  Rounds<17, 29, 16, 24>(x0, x1, set(ks[2]), set(ks[0] + 2));
  Rounds<13, 15, 26, 6>(x0, x1, set(ks[0]), set(ks[1] + 3));
  Rounds<17, 29, 16, 24>(x0, x1, set(ks[1]), set(ks[2] + 4));
  Rounds<13, 15, 26, 6>(x0, x1, set(ks[2]), set(ks[0] + 5));
}

// Numbers 2c and 2c + 1 come from counter c by Box-Muller, whatever the vector length.
void Normal(Block key, uint64_t counter, float* out, size_t count) {
  const hn::ScalableTag<uint32_t> du;
  const hn::RebindToSigned<decltype(du)> di;
  const hn::RebindToFloat<decltype(du)> df;
  const size_t lanes = hn::Lanes(du);
  HWY_ALIGN float tail[2 * HWY_MAX_BYTES / sizeof(float)];
  for (size_t at = 0; at < count; at += 2 * lanes, counter += lanes) {
    auto x0 = hn::Iota(du, static_cast<uint32_t>(counter));
    auto x1 = hn::Set(du, static_cast<uint32_t>(counter >> 32));
    Threefry(du, x0, x1, key);
    // 31 bits for the radius (strictly between 0 and 1, so it is finite and not zero), 32 signed bits for the angle in
    // [-pi, pi).
    const auto u = hn::Min(hn::MulAdd(hn::ConvertTo(df, hn::BitCast(di, hn::ShiftRight<1>(x0))), hn::Set(df, 0x1p-31f),
                                      hn::Set(df, 0x1p-32f)),
                           hn::Set(df, 0x1.fffffep-1f));
    const auto radius = hn::Sqrt(hn::Mul(hn::Set(df, -2.0f), hn::Log(df, u)));
    const auto angle =
        hn::Mul(hn::ConvertTo(df, hn::BitCast(di, x1)), hn::Set(df, 1.4629180792671596e-9f));  // pi / 2^31
    const auto even = hn::Mul(radius, hn::Cos(df, angle));
    const auto odd = hn::Mul(radius, hn::Sin(df, angle));
    if (at + 2 * lanes <= count) {
      hn::StoreInterleaved2(even, odd, df, out + at);
    } else {
      hn::StoreInterleaved2(even, odd, df, tail);
      for (size_t i = at; i < count; ++i) out[i] = tail[i - at];
    }
  }
}

void One(Block counter, Block key, Block* out) {
  const hn::CappedTag<uint32_t, 1> d;
  auto x0 = hn::Set(d, counter.x0);
  auto x1 = hn::Set(d, counter.x1);
  Threefry(d, x0, x1, key);
  *out = {hn::GetLane(x0), hn::GetLane(x1)};
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::experiments
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lla::experiments {
HWY_EXPORT(Normal);
HWY_EXPORT(One);

Block threefry(Block counter, Block key) {
  Block out;
  HWY_DYNAMIC_DISPATCH(One)(counter, key, &out);
  return out;
}

Stream::Stream(uint64_t seed, uint64_t item, uint64_t purpose) {
  const auto split = [](uint64_t v) { return Block{static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32)}; };
  key_ = threefry(split(purpose), threefry(split(item), split(seed)));
}

void Stream::normal(float* out, size_t count, uint64_t start) const {
  HWY_DYNAMIC_DISPATCH(Normal)(key_, start / 2, out, count);
}

double Stream::uniform(uint64_t index) const {
  // The complement of the counters normal() uses: the two never meet.
  const Block b = threefry({~static_cast<uint32_t>(index), ~static_cast<uint32_t>(index >> 32)}, key_);
  return ((uint64_t{b.x1} << 32 | b.x0) >> 11) * 0x1p-53;
}

}  // namespace lla::experiments
#endif
