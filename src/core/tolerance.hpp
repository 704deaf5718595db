// When a row's solve stops: the defaults, and the one rule every implementation follows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lla/lla.hpp"

namespace lla::core {

// Relative residual asked for where the caller names none: what the outputs' type can show.
constexpr double default_tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64: return 1e-9;
    case DType::f32: return 1e-4;
    default: return 1e-3;  // 16 bits
  }
}

// Conjugate gradients with rounded directions need up to 3.6 D iterations on normalised keys where exact ones need 1.4
// D.
constexpr int default_max_iterations(int64_t dim) { return static_cast<int>(std::max<int64_t>(64, 4 * dim)); }

// A row stops where |r| <= limit(|right-hand side|, |ridge * solution|).
//
// The backward's solve A y = t feeds the gradients through b = (G.v - mean) - (k - mean).y, whose weighted moment is
// t - covariance y = ridge y + r: where the keys can express t (few keys, small ridge) that is all that is left of t,
// and a residual that is small against t alone may be larger than it. So the backward also asks for a residual that is
// small against ridge y, ten tolerances of it, down to what the arithmetic can give.
struct StopRule {
  double residual = 1e-3;  // against the right-hand side
  double ridge_part = 0;   // against ridge * solution; 0: not asked for
  double least = 0;        // of the right-hand side: no row is asked for less because of ridge_part

  constexpr StopRule() = default;
  constexpr StopRule(double tolerance) : residual(tolerance) {}  // NOLINT(google-explicit-constructor): a tolerance is one
  constexpr StopRule(double residual, double ridge_part, double least)
      : residual(residual), ridge_part(ridge_part), least(least) {}

  constexpr double limit(double rhs, double ridge_solution) const {
    if (ridge_part == 0) return residual * rhs;
    return std::min(residual * rhs, std::max(ridge_part * ridge_solution, least * rhs));
  }
};

}  // namespace lla::core
