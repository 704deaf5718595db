// The fp64 truth: plain code, slow and obviously right, any mask, any ridge, given x.
//
// This header works on one head of one sequence in dense row-major doubles; implementation.cpp puts it behind the
// public interface. Unlike the other implementations it allocates as it goes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/problem.hpp"

namespace lla::reference {

using Vector = std::vector<double>;
using Span = std::span<const double>;

struct Head {
  int64_t length_q = 0;
  int64_t length_k = 0;
  int64_t dim = 0;
  int64_t value_dim = 0;
  Vector q;      // (length_q, dim)
  Vector k;      // (length_k, dim)
  Vector v;      // (length_k, value_dim)
  Vector ridge;  // (length_q, dim), or empty when x is given
  Vector x;      // (length_q, dim), or empty when there is a ridge
  double scale = 1;
  core::Mask mask;
  int64_t first_key = 0;  // the keys before it are invisible
};

struct SolveOptions {
  bool cg = false;               // conjugate gradients instead of Cholesky
  core::StopRule stop;           // of the solve for x
  core::StopRule backward_stop;  // of the backward's solve for y
  int max_iterations = 64;
};

// Result of solving A x = b for one row.
struct Solution {
  Vector x;
  int iterations = -1;   // -1: solved directly
  double residual = -1;  // |b - A x| / |b| as conjugate gradients sees it; -1: solved directly
  lla_row_status status = LLA_ROW_OK;
  Vector trace;  // the relative residual before the first and after each iteration (empty when solved directly)
};

struct ForwardResult {
  Vector o;                        // (length_q, value_dim)
  Vector max;                      // (length_q): ceil of the largest logit in log2 units, 0 for a row without keys
  Vector omega;                    // (length_q): sum of exp2(logit - max), 0 for a row without keys
  Vector mean_k;                   // (length_q, dim)
  Vector mean_v;                   // (length_q, value_dim)
  Vector x;                        // (length_q, dim)
  std::vector<Solution> solution;  // (length_q)
};

// With x given, dx is filled and dridge empty; otherwise the other way round.
struct BackwardResult {
  Vector dq, dk, dv;
  Vector dridge;  // (length_q, dim): per dimension, before any sum over what the ridge was broadcast over
  Vector dx;      // (length_q, dim)
  std::vector<Solution> solution;  // of A y = t
};

ForwardResult forward(const Head& head, const SolveOptions& options);
BackwardResult backward(const Head& head, Span grad_o, const SolveOptions& options);

// The parts, for tests and experiments.

// The matrix A of one row without its ridge: sum of p_j (k_j - mean)(k_j - mean)^T, dense (dim, dim).
Vector covariance(Span p, Span keys, Span mean);
// Variance that the rounding of mean and differences alone can produce; what is not above it says nothing.
double rounding_noise(Span keys, size_t count);
// Cholesky with guarded pivots: a direction whose pivot is not above rounding gets no step, and the row reports
// BREAKDOWN. An infinite ridge in a dimension removes it: its x is 0.
Solution solve_direct(Span covariance, Span ridge, Span b, double noise = 0);
// Stops by the rule, at max_iterations, or, with BREAKDOWN, where the curvature is not above rounding.
// keys: that the row sees.
Solution solve_cg(Span covariance, Span ridge, Span b, core::StopRule stop, int max_iterations, double noise = 0,
                  int64_t keys = 0);

}  // namespace lla::reference
