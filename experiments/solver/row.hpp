// One query's LLA by conjugate gradients, in two algebraically equal forms and several arithmetics:
//   centered  keys relative to their weighted mean (this library): A = Σ p (k - k̄)(k - k̄)' + λ I,  A x = q - k̄
//   z         keys relative to the query (the paper): Σ = Σ w (k - q)(k - q)' + λω I,  Σ ρ = μ,  s = w (1 - z·ρ) / (ω -
//   μ·ρ)
#pragma once

#include <cstdint>
#include <vector>

#include "solver/arithmetic.hpp"

namespace lla::experiments {

enum class Form { centered, z };
inline constexpr std::array<const char*, 2> kFormNames = {"centered", "z"};

// One head's keys and values, both ways round so that every loop over them is contiguous.
struct Keys {
  int64_t n, d;
  std::vector<float> k, v;  // (n, d)
  std::vector<float> kt;    // (d, n)
  double largest = 0;       // |k| <= largest, elementwise maximum
  Keys(int64_t n, int64_t d, std::vector<float> keys, std::vector<float> values);
};

struct RowOptions {
  Form form = Form::centered;
  Arithmetic arithmetic = Arithmetic::f32;
  double scale = 1;
  double ridge = 0.1;
  double tolerance = 1e-3;
  int max_iterations = 128;
};

struct RowResult {
  std::vector<double> o;
  int iterations = 0;
  bool converged = false;  // the tolerance was met, as far as the recurrence can tell
};

// The query sees keys [0, visible).
RowResult solve_row(const Keys&, int64_t visible, const float* q, const RowOptions&);

}  // namespace lla::experiments
