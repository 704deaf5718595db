// Products k . u - center, in float or, where the two are large and nearly equal, in double.
//
// With a large common mean of the keys, or a solution that is long because the ridge is small, k . u and center agree
// in most of their digits: in float their difference has an error of 2^-24 |center|. Those products are taken in double
// and rounded once, after the subtraction. What center itself was rounded by is common to all keys, and the row sums
// take it off again.
#if defined(LLA_CPU_CENTERED_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_CENTERED_INL_HPP
#undef LLA_CPU_CENTERED_INL_HPP
#else
#define LLA_CPU_CENTERED_INL_HPP
#endif

#include <algorithm>
#include <cmath>

#include "cpu/gemm-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

enum class Precision { native, f64, automatic /* f64 where a center is large */ };

// From this |center| on double pays: below, the error of the difference is about 1e-6 at most.
constexpr float kPreciseFrom = 16;

// Conjugate gradients take their products in double where the mean key is long against the keys' spread and the
// tolerance asks for more than float can give then.
template <class T>
bool precise_iterations(T mean_squares, T variance, int64_t dim, double tolerance) {
  return sizeof(T) == 4 && tolerance < 1e-4 && mean_squares > 4 * variance * static_cast<T>(dim);
}

template <class T>
bool any_large(const T* centers, int64_t count) {
  return std::any_of(centers, centers + count, [](T c) { return std::abs(c) > kPreciseFrom; });
}

// One center a lane.
template <class T>
struct LaneCenters {
  const T* centers;

  HWY_INLINE Vec<T> at(int64_t, int64_t lane) const { return load(centers + lane); }
  HWY_INLINE Vec<double> wide(int64_t, int64_t lane) const {
    return hn::PromoteTo(Tag<double>(), hn::LoadU(hn::Rebind<float, Tag<double>>(), centers + lane));
  }
  bool large(int64_t) const { return any_large(centers, kPanel<T>); }
};

// One center a row, from the first row of the tile on, as in pass B of the backward.
template <class T>
struct RowCenters {
  const T* centers;

  HWY_INLINE Vec<T> at(int64_t row, int64_t) const { return splat(centers[row]); }
  HWY_INLINE Vec<double> wide(int64_t row, int64_t) const { return splat(static_cast<double>(centers[row])); }
  bool large(int64_t rows) const { return any_large(centers, rows); }
};

// to[j] = grouped row j . vector - center, for rows [lo, hi) and on to the end of a register block of grouped_product:
// what follows may read that far.
template <class Centers>
HWY_NOINLINE void precise_tile(const float* grouped, int64_t channels, int64_t lo, int64_t hi, const float* vector,
                               const Centers& centers, float* to) {
  constexpr int kWide = static_cast<int>(kPanel<float> / kLanes<double>);  // vectors of doubles a panel
  constexpr int kHalf = kRows / 2;  // as many accumulators as a block of floats has
  const Tag<double> d;
  const hn::Rebind<float, Tag<double>> df;
  for (int64_t j = lo; j < lo + round_up(hi - lo, kRows); j += kHalf) {
    const float* a = grouped + j / kGroup * kGroup * channels + j % kGroup;
    Vec<double> sums[kHalf][kWide];
    for (auto& row : sums) {
      for (auto& sum : row) sum = hn::Zero(d);
    }
    const float* b = vector;
    for (int64_t c = 0; c < channels; ++c, a += kGroup, b += kPanel<float>) {
      Vec<double> wide[kWide];
      for (int v = 0; v < kWide; ++v) wide[v] = hn::PromoteTo(d, hn::LoadU(df, b + v * kLanes<double>));
      for (int i = 0; i < kHalf; ++i) {
        const auto ai = splat(static_cast<double>(a[i]));
        for (int v = 0; v < kWide; ++v) sums[i][v] = hn::MulAdd(ai, wide[v], sums[i][v]);
      }
    }
    for (int i = 0; i < kHalf; ++i) {
      for (int v = 0; v < kWide; ++v) {
        const int64_t at = (j - lo + i) * kPanel<float> + v * kLanes<double>;
        hn::StoreU(hn::DemoteTo(df, hn::Sub(sums[i][v], centers.wide(j - lo + i, v * kLanes<double>))), df, to + at);
      }
    }
  }
}

// epilogue(j - lo, two vectors of grouped row j . vector - center) for rows [lo, hi). `scratch` is a tile for values
// taken in double.
template <Precision kPrecision = Precision::automatic, class T, class Centers, class Epilogue>
HWY_INLINE void centered_product(const T* grouped, int64_t channels, int64_t lo, int64_t hi, const T* vector,
                                 const Centers& centers, T* scratch, const Epilogue& epilogue) {
  if constexpr (sizeof(T) == 4 && kPrecision != Precision::native) {
    if (kPrecision == Precision::f64 || centers.large(hi - lo)) {
      precise_tile(grouped, channels, lo, hi, vector, centers, scratch);
      for (int64_t j = 0; j < round_up(hi - lo, kRows); ++j) {
        epilogue(j, load(scratch + j * kPanel<T>), load(scratch + j * kPanel<T> + kLanes<T>));
      }
      return;
    }
  }
  grouped_product(grouped, channels, lo, hi, vector, [&](int64_t j, Vec<T> e0, Vec<T> e1) HWY_ATTR {
    epilogue(j, hn::Sub(e0, centers.at(j, 0)), hn::Sub(e1, centers.at(j, kLanes<T>)));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
