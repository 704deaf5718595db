// Where a lane's solve may stop, and what it may claim then.
//
// The recurrence r -= stride A d knows nothing of what rounding did to A d: long solutions (a small ridge) and long
// keys (a common mean) let it drift away from b - A x. The drift is estimated from sizes that are known; a lane it may
// matter to is checked: b - A x is formed once, with products in double, and conjugate gradients go on from there where
// that misses.
#if defined(LLA_CPU_STOP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_STOP_INL_HPP
#undef LLA_CPU_STOP_INL_HPP
#else
#define LLA_CPU_STOP_INL_HPP
#endif

#include "core/tolerance.hpp"
#include "cpu/panel-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// Squares and products of a panel's solution x, lane by lane.
template <class T>
struct SolutionSizes {
  HWY_ALIGN T squares[kPanel<T>];        // |x|^2
  HWY_ALIGN T ridge_squares[kPanel<T>];  // |ridge x|^2
  HWY_ALIGN T ridge_product[kPanel<T>];  // x . ridge x
  HWY_ALIGN T rhs_product[kPanel<T>];    // x . right-hand side

  SolutionSizes(const Panel<T>& panel, int64_t dim) {
    const auto zero = hn::Zero(Tag<T>());
    for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
      auto xx = zero, rr = zero, xr = zero, xb = zero;
      for (int64_t e = at; e < dim * kPanel<T>; e += kPanel<T>) {
        const auto x = load(panel.solution + e), ridge_x = hn::Mul(load(panel.ridge + e), x);
        xx = hn::MulAdd(x, x, xx);
        rr = hn::MulAdd(ridge_x, ridge_x, rr);
        xr = hn::MulAdd(ridge_x, x, xr);
        xb = hn::MulAdd(x, load(panel.rhs + e), xb);
      }
      store(xx, squares + at);
      store(rr, ridge_squares + at);
      store(xr, ridge_product + at);
      store(xb, rhs_product + at);
    }
  }

  // Weighted rms of (k - mean).x: x . covariance x = x . (b - ridge x), up to the residual.
  double spread(int64_t l) const {
    return std::sqrt(std::max(0.0, static_cast<double>(rhs_product[l]) - static_cast<double>(ridge_product[l])));
  }
};

// The residual a lane may stop at with the solution it has, squared.
template <class T>
T stop_limit(const core::StopRule& stop, const SolutionSizes<T>& x, const Panel<T>& panel, T rr_start, T smallest_ridge,
             int64_t l) {
  const core::SolveSizes sizes{.rhs_squares = static_cast<double>(rr_start),
                               .rhs_product = static_cast<double>(x.rhs_product[l]),
                               .ridge_product = static_cast<double>(x.ridge_product[l]),
                               .ridge_squares = static_cast<double>(x.ridge_squares[l]),
                               .smallest_ridge = static_cast<double>(smallest_ridge),
                               .spread = static_cast<double>(panel.spread[l]) * panel.row_unit_squares[l],
                               .row_unit_squares = panel.row_unit_squares[l]};
  return static_cast<T>(stop.limit(sizes, panel.lane_end[l] - panel.lane_begin[l]));
}

// What a lane that says OK may report, relative to its right-hand side: its tolerance, or, where the arithmetic cannot
// give that, what it still can on data that deserve an answer. A lane with more hidden from it has no solution.
template <class T>
double most_noise(double tolerance) {
  return std::max(tolerance, sizeof(T) == 8 ? 1e-9 : 1e-3);
}

// How far b - A x may be from a lane's residual: by the recurrence's drift (each product k . u is off by about
// epsilon |k| |u|, and the solution is the sum of the steps), and by the rounding of logits and sums, which a check
// has too. rhs: |b|; keys: root of the mean |k|^2; steepest: the largest eigenvalue of A seen; query: |q| in the units
// of the logits. The factors are twice what was measured (docs/cpu.md).
template <class T>
struct Noise {
  double drift, rounding;

  Noise(const SolutionSizes<T>& x, int64_t l, double rhs, double keys, double steepest, double query) {
    const double half_ulp = static_cast<double>(std::numeric_limits<T>::epsilon()) / 2;
    drift = 4 * half_ulp * keys * std::sqrt(steepest * static_cast<double>(x.squares[l]));
    rounding = half_ulp * (2 * rhs + keys * (4 + query * keys / 2) * x.spread(l));
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
