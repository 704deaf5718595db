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

// Conjugate gradients with rounded directions need up to 3.6 D iterations on normalised keys at a ridge of 0.01 where
// exact ones need 1.4 D, and at the layer's floor of 1e-3 twice that.
constexpr int default_max_iterations(int64_t dim) {
  return static_cast<int>(std::clamp<int64_t>(8 * dim, 64, INT32_MAX));
}

// Where rows that do not finish are solved directly, half of that: they get there sooner.
constexpr int iterations_before_direct(int max_iterations, int64_t dim) {
  return std::min(max_iterations, default_max_iterations((dim + 1) / 2));
}

// Sizes of a row's solution x so far (in the backward y), from which the rule knows what a residual does to the result.
struct SolveSizes {
  double rhs_squares = 0;       // |right-hand side|^2
  double rhs_product = 0;       // x . right-hand side
  double ridge_product = 0;     // x . ridge x
  double ridge_squares = 0;     // |ridge x|^2
  double smallest_ridge = 0;    // over the channels
  double spread = 0;            // backward: weighted mean of (G.v - mean)^2; 0 where it is not known
  double row_unit_squares = 1;  // forward: what 1 has become, squared, where the right-hand side was scaled
};

// A row stops where |r|^2 <= limit(sizes, keys it sees).
//
// A residual r moves E = (k - mean).x by at most |r| / (2 sqrt(ridge)), weighted rms. What the output takes from a row
// is a = 1 + E, of square 1 + x . covariance x; what the gradients take is b = (G.v - mean) - (k - mean).y, of square
// spread - 2 t.y + y . covariance y. And the weighted moment of b is t - covariance y = ridge y + r: where the keys can
// express t (few keys, a small ridge) b and that moment are all that is left of t, and a residual that is small against
// t alone may be larger than they are. So besides the residual against the right-hand side a row asks for one that is
// small against what is left, `share` of it, down to `least`. Where a is not small beside the right-hand side
// this changes nothing; queries far outside their keys and gradients of rows with few keys need it.
struct StopRule {
  double residual = 1e-3;  // against the right-hand side
  double share = 0;        // against what is left; 0: not asked for
  double least = 0;        // of the right-hand side: `share` asks for no less
  bool backward = false;
  int64_t few_keys = -1;  // rows that see no more are short: 0.3 of the residual costs little and the ridge's gradient,
                          // a sum that cancels, gains by it

  constexpr StopRule() = default;
  constexpr StopRule(double tolerance) : residual(tolerance) {}  // NOLINT(google-explicit-constructor): plainly that

  // What a row has to reach whatever its solution.
  constexpr double start(double rhs_squares, int64_t keys) const {
    const double tolerance = keys <= few_keys ? std::min(residual, std::max(0.3 * residual, least)) : residual;
    return tolerance * tolerance * rhs_squares;
  }
  constexpr double limit(const SolveSizes& x, int64_t keys) const {
    const double most = start(x.rhs_squares, keys);
    if (share == 0) return most;
    const double squares =
        backward ? x.spread - x.rhs_product - x.ridge_product : x.row_unit_squares + x.rhs_product - x.ridge_product;
    const double left = std::max(backward ? x.ridge_squares : 0.0, 4 * x.smallest_ridge * std::max(0.0, squares));
    return std::min(most, std::max(share * share * left, least * least * x.rhs_squares));
  }
};

// The rules of a problem with this tolerance.
constexpr StopRule forward_stop_rule(double tolerance, int64_t dim) {
  StopRule rule(tolerance);
  rule.share = 6 * tolerance;
  rule.least = 0.2 * tolerance;
  rule.few_keys = 2 * dim;
  return rule;
}
constexpr StopRule backward_stop_rule(double tolerance, DType dtype, int64_t dim) {
  StopRule rule(tolerance);
  rule.share = 10 * tolerance;
  rule.least = std::min(dtype == DType::f64 ? 1e-14 : 1e-6, tolerance);  // what the arithmetic can give
  rule.backward = true;
  rule.few_keys = 2 * dim;
  return rule;
}

}  // namespace lla::core
