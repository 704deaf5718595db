// The cost model behind solver = auto: every rule that chooses between conjugate gradients and the direct solver is
// here.
//
// Unit: one iteration of conjugate gradients with cached weights, two products. Forming the direct solver's matrix
// takes (D + 1)(D + 2) / 2 multiply-adds a pair in double where an iteration takes 2 D in the problem's arithmetic;
// factoring it takes D^3 / 6 a row, which few keys do not hide.
#pragma once

#include <algorithm>
#include <cstdint>

namespace lla::cpu {

// Iterations that cost as much as one direct solve of a row that sees `keys` keys.
inline int direct_cost_in_iterations(int64_t dim, int64_t keys, bool double_arithmetic) {
  const double d = static_cast<double>(dim);
  const double rate = double_arithmetic ? 1.0 : 2.0;  // a vector holds half as many doubles as floats
  const double form = rate * (d + 1) * (d + 2) / 2 / (2 * d);
  const double factor =
      rate * 1.2 * d * d * d / 6 / (2 * d) / static_cast<double>(std::max<int64_t>(keys, 1));  // measured
  return static_cast<int>(form + factor) + 1;
}

// Conjugate gradients rarely finish in fewer iterations than this at the default tolerance; with a tighter one they
// need more.
inline bool direct_first(int64_t dim, int64_t keys, double tolerance, bool double_arithmetic) {
  const int usual_iterations = tolerance >= 5e-4 ? 8 : tolerance >= 1e-5 ? 16 : 32;
  return direct_cost_in_iterations(dim, keys, double_arithmetic) <= usual_iterations;
}

// A row whose ridge is tiny against the curvature met so far and whose weights sit on few keys: conjugate gradients may
// meet the tolerance there and still be wrong, because the residual says little about the directions that decide the
// output.
template <class T>
bool too_ill_conditioned(T smallest_ridge, T curvature, T effective_keys, int64_t dim) {
  return smallest_ridge < curvature * static_cast<T>(1e-3) && effective_keys <= static_cast<T>(2 * dim);
}

}  // namespace lla::cpu
