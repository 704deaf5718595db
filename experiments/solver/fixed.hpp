// What a fixed number of iterations gives: the output's error after T steps of conjugate gradients, of conjugate
// gradients with the matrix's diagonal as preconditioner, and of Chebyshev's iteration. In fp64, so that only the
// number of steps counts (solver/row.hpp has the arithmetics).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "solver/row.hpp"

namespace lla::experiments {

enum class Method { cg, diagonal, chebyshev };
inline constexpr std::array<const char*, 3> kMethodNames = {"cg", "diagonal", "chebyshev"};
inline constexpr std::array<int, 8> kSteps = {1, 2, 4, 8, 16, 32, 64, 128};

// One query's system, dense: the centered matrix without the ridge, its right-hand side q - k̄, and the map from x to
// the output, o = v̄ + C x.
class RowSystem {
 public:
  // The query sees keys [0, visible).
  RowSystem(const Keys&, int64_t visible, const float* q, double scale);

  // Relative error of the output after each of kSteps iterations, against the direct solve. Chebyshev's iteration needs
  // bounds of the spectrum: the ridge from below, and from above the largest eigenvalue itself, which in practice would
  // have to be estimated.
  std::array<double, kSteps.size()> errors(Method, double ridge) const;

 private:
  using Vector = std::vector<double>;
  Vector apply(const Vector& u, double ridge) const;
  Vector solve(double ridge) const;
  double output_error(const Vector& x, const Vector& exact, const Vector& output) const;

  int64_t d_;
  Vector a_, b_, c_, mean_v_;
  double largest_ = 0;  // eigenvalue of a_
};

}  // namespace lla::experiments
