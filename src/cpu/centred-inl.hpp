// Products k . u - centre, in float or, where the two are large and nearly equal, in double.
//
// With a large common mean of the keys, or a solution that is long because the ridge is small, k . u and centre agree
// in most of their digits: in float their difference has an error of 2^-24 |centre|. Those products are taken in double
// and rounded once, after the subtraction. What centre itself was rounded by is common to all keys, and the row sums
// take it off again.
#if defined(LLA_CPU_CENTRED_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_CENTRED_INL_HPP
#undef LLA_CPU_CENTRED_INL_HPP
#else
#define LLA_CPU_CENTRED_INL_HPP
#endif

#include <algorithm>
#include <cmath>

#include "cpu/gemm-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// From this |centre| on, in units of what the differences amount to, double pays: below, the error of a difference is
// about 1e-6 at most.
constexpr float kPreciseFrom = 16;

// Conjugate gradients take a row's products in double where its mean key is long against its keys' spread and the
// tolerance asks for more than float can give then.
template <class T>
bool precise_iterations(T mean_squares, T variance, int64_t dim, double tolerance) {
  return sizeof(T) == 4 && tolerance < 1e-4 && mean_squares > 4 * variance * static_cast<T>(dim);
}

// Each lane's centre u . mean, in the order of the products themselves: where the mean is a key the difference is
// exactly 0. Lanes decide for themselves what is precise, so no row's result depends on its neighbours in the panel.
template <class T>
struct LaneCentres {
  HWY_ALIGN T native[kPanel<T>];
  HWY_ALIGN double wide[kPanel<T>];
  HWY_ALIGN T precise[kPanel<T>];  // 1 for lanes whose products are taken in double, else 0
  const T* low;                    // what rounding took off u, or null; counts where products are taken in double

  // size: lane by lane, what the differences amount to; 1 where none is given, as for E, which is compared with 1.
  // Where there is a low part, its lanes are taken in double whatever their centre.
  void set_by_size(const T* u, const T* mean, int64_t channels, const T* size = nullptr, const T* low_part = nullptr,
                   const bool* low_lanes = nullptr) {
    lane_dots(u, mean, channels, native);
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      const T from = static_cast<T>(kPreciseFrom) * (size ? size[l] : T{1});
      const bool counts = std::abs(native[l]) > from || (low_part && low_lanes[l]);
      precise[l] = sizeof(T) == 4 && counts ? T{1} : T{0};
    }
    low = low_part;
    set_wide(u, mean, channels);
  }
  void set_precise(const T* u, const T* mean, int64_t channels, const T* precise_lanes) {
    lane_dots(u, mean, channels, native);
    std::copy_n(precise_lanes, kPanel<T>, precise);
    low = nullptr;
    set_wide(u, mean, channels);
  }
  bool any_precise(int64_t) const {
    return std::any_of(precise, precise + kPanel<T>, [](T x) { return x != 0; });
  }

  HWY_INLINE Vec<T> at(int64_t, int64_t lane) const { return load(native + lane); }
  HWY_INLINE Vec<double> wide_at(int64_t, int64_t lane) const { return load(wide + lane); }
  HWY_INLINE auto precise_at(int64_t, int64_t lane) const { return hn::Gt(load(precise + lane), hn::Zero(Tag<T>())); }

 private:
  void set_wide(const T* u, const T* mean, int64_t channels) {
    if (!any_precise(0)) return;
    if constexpr (sizeof(T) == 4) {
      const Tag<double> d;
      const hn::Rebind<float, Tag<double>> df;
      for (int64_t at = 0; at < kPanel<T>; at += kLanes<double>) {
        auto sum = hn::Zero(d);
        for (int64_t c = 0; c < channels; ++c) {
          const int64_t e = c * kPanel<T> + at;
          auto value = hn::PromoteTo(d, hn::LoadU(df, u + e));
          if (low) value = hn::Add(value, hn::PromoteTo(d, hn::LoadU(df, low + e)));
          sum = hn::MulAdd(value, hn::PromoteTo(d, hn::LoadU(df, mean + e)), sum);
        }
        store(sum, wide + at);
      }
    }
  }
};

// One centre a row, from the first row of the tile on, as in pass B of the backward.
template <class T>
struct RowCentres {
  static constexpr const T* low = nullptr;
  const T* native;
  const T* precise;
  const double* wide;

  bool any_precise(int64_t rows) const {
    return sizeof(T) == 4 && std::any_of(precise, precise + rows, [](T x) { return x != 0; });
  }
  HWY_INLINE Vec<T> at(int64_t row, int64_t) const { return splat(native[row]); }
  HWY_INLINE Vec<double> wide_at(int64_t row, int64_t) const { return splat(wide[row]); }
  HWY_INLINE auto precise_at(int64_t row, int64_t) const { return hn::Gt(splat(precise[row]), hn::Zero(Tag<T>())); }
};

// to[j] = transposed row j . vector - centre, for rows [lo, hi) and on to the end of a register block of
// transposed_product: what follows may read that far.
template <class Centres>
HWY_NOINLINE void precise_tile(const float* transposed, int64_t channels, int64_t lo, int64_t hi, const float* vector,
                               const Centres& centres, float* to) {
  constexpr int kWide = static_cast<int>(kPanel<float> / kLanes<double>);  // vectors of doubles a panel
  constexpr int kHalf = kRows / 2;  // as many accumulators as a block of floats has
  const Tag<double> d;
  const hn::Rebind<float, Tag<double>> df;
  for (int64_t j = lo; j < lo + round_up(hi - lo, kRows); j += kHalf) {
    const float* a = transposed + j / kPackRows * kPackRows * channels + j % kPackRows;
    Vec<double> sums[kHalf][kWide];
    for (auto& row : sums) {
      for (auto& sum : row) sum = hn::Zero(d);
    }
    const float* b = vector;
    for (int64_t c = 0; c < channels; ++c, a += kPackRows, b += kPanel<float>) {
      Vec<double> wide[kWide];
      for (int v = 0; v < kWide; ++v) {
        wide[v] = hn::PromoteTo(d, hn::LoadU(df, b + v * kLanes<double>));
        if (centres.low) {
          wide[v] = hn::Add(wide[v], hn::PromoteTo(d, hn::LoadU(df, centres.low + (b - vector) + v * kLanes<double>)));
        }
      }
      for (int i = 0; i < kHalf; ++i) {
        const auto ai = splat(static_cast<double>(a[i]));
        for (int v = 0; v < kWide; ++v) sums[i][v] = hn::MulAdd(ai, wide[v], sums[i][v]);
      }
    }
    for (int i = 0; i < kHalf; ++i) {
      for (int v = 0; v < kWide; ++v) {
        const int64_t at = (j - lo + i) * kPanel<float> + v * kLanes<double>;
        hn::StoreU(hn::DemoteTo(df, hn::Sub(sums[i][v], centres.wide_at(j - lo + i, v * kLanes<double>))), df, to + at);
      }
    }
  }
}

// epilogue(j - lo, two vectors of transposed row j . vector - centre) for rows [lo, hi). `scratch` is a tile for values
// taken in double.
template <class T, class Centres, class Epilogue>
HWY_INLINE void centred_product(const T* transposed, int64_t channels, int64_t lo, int64_t hi, const T* vector,
                                const Centres& centres, T* scratch, const Epilogue& epilogue) {
  if constexpr (sizeof(T) == 4) {
    if (centres.any_precise(hi - lo)) {
      precise_tile(transposed, channels, lo, hi, vector, centres, scratch);
      transposed_product(transposed, channels, lo, hi, vector, [&](int64_t j, Vec<T> e0, Vec<T> e1) HWY_ATTR {
        const auto choose = [&](Vec<T> e, int64_t lane) HWY_ATTR {
          const auto precise = load(scratch + j * kPanel<T> + lane);
          return hn::IfThenElse(centres.precise_at(j, lane), precise, hn::Sub(e, centres.at(j, lane)));
        };
        epilogue(j, choose(e0, 0), choose(e1, kLanes<T>));
      });
      return;
    }
  }
  transposed_product(transposed, channels, lo, hi, vector, [&](int64_t j, Vec<T> e0, Vec<T> e1) HWY_ATTR {
    epilogue(j, hn::Sub(e0, centres.at(j, 0)), hn::Sub(e1, centres.at(j, kLanes<T>)));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
