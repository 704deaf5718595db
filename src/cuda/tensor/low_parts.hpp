// Which rows' vectors need a second fp16 part. Plain C++: tested on the CPU.
#pragma once

#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::tensor {

// Whether E = (k - mean)·x and F = (k - mean)·y need what rounding x and y to fp16 leaves over. Rounding moves E by
// about 2.0e-4 (rms) of |x| times the keys' spread along an axis, for which the largest curvature of A stands. That may
// be as much as 0.6 tol of what it is added to: of sqrt(1 + Σ p E²) for E, of sqrt(Σ p F²) for F. As A x = q - mean,
// Σ p E² = x·(q - mean) - Σ λ x², and likewise for y. Comparisons are such that a NaN asks for low parts.
struct LowParts {
  float factor;  // (2.0e-4 / (0.6 tol))²

  static constexpr LowParts of(double tolerance) { return {static_cast<float>(4e-8 / (0.36 * tolerance * tolerance))}; }

  constexpr bool of_y(float y_squared, float curvature, float variance) const {
    return !(factor * y_squared * curvature <= variance);
  }
  // The least x·(q - mean) of a row that needs none.
  constexpr float least(float x_squared, float curvature, float ridge_share) const {
    return factor * x_squared * curvature - 1 + ridge_share;
  }
};

}  // namespace lla::cuda::tensor
