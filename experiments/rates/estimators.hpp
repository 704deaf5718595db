// The three regression strategies of the paper's Propositions 1 and 2, on samples from the unit ball: one global affine
// fit, local constant (Nadaraya-Watson) and local linear, the local ones with a compact radial kernel as the proofs
// assume.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/random.hpp"

namespace lla::experiments {

inline constexpr int kMaxRateDim = 4;
using Point = std::array<double, kMaxRateDim>;

// Smooth, not affine, with a large slope across most of the boundary: what the propositions ask for.
double target(int d, const Point& x);

// Uniform on the unit ball of R^d; draws numbers [index * 8, index * 8 + 8) of the stream. With `strata` > 0 the points
// 0 … strata-1 fall into shells of equal volume, one each: the same mean with less scatter.
Point ball_point(const Stream&, int d, uint64_t index, int strata = 0);

// n noisy observations of the target, kept by cells of a grid over the first two coordinates.
class Sample {
 public:
  Sample(const Stream&, int d, int64_t n, double noise);

  struct Estimates {
    double local_constant, local_linear;
  };
  // Weights 1 - |x_i - x|^2 / h^2 inside the ball of radius h, for each its own h. Where no observation is near, the
  // mean of all; where the neighbours do not determine a plane, their weighted mean.
  Estimates local(const Point& x, double h_constant, double h_linear) const;
  double global_linear(const Point& x) const;

 private:
  template <int kDim>
  Estimates local_in(const Point& x, double h_constant, double h_linear) const;
  void fit_global();

  int d_;
  int64_t n_;
  std::vector<Point> x_;
  std::vector<double> y_;
  std::vector<int32_t> cell_start_;
  double mean_ = 0;
  std::array<double, kMaxRateDim + 1> global_{};  // intercept, slopes
};

}  // namespace lla::experiments
