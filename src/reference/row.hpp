// One row: a query and the keys it sees. Shared by forward and backward.
#pragma once

#include "reference/reference.hpp"

namespace lla::reference {

struct Row {
  int64_t index;
  int64_t begin, end;  // the keys it sees
  bool empty;          // sees no key: output and gradients are zero, whatever q and the ridge hold
  bool bad;  // a negative or NaN ridge, or a non-finite q, x, visible key or value: everything it touches is NaN
  Span q, keys, values, ridge, x;

  int64_t count() const { return end - begin; }
};

Row make_row(const Head& head, int64_t index);

struct Statistics {
  double max = 0;  // integer, log2 units
  double omega = 0;
  Vector p;  // normalised weights of the visible keys
  Vector mean_k, mean_v;
  Vector covariance;  // of the keys, where there is something to solve (x is not given)
};

Statistics statistics(const Head& head, const Row& row);

// A x = b for the row's A = covariance + ridge; conjugate gradients stop by the rule.
Solution solve_row(const Row& row, const Statistics& statistics, Span b, const SolveOptions& options,
                   const core::StopRule& stop);

// The row's x: as given, or A x = q - mean_k.
Solution solve_for_x(const Row& row, const Statistics& statistics, const SolveOptions& options);

// Sum of p_j values_j over rows of `width` columns.
Vector weighted_sum(Span p, Span values, size_t width);
double dot(Span a, Span b);
bool all_finite(Span values);
// (key - mean).x, centred before the product: x can be large in directions the keys do not reach.
double centred_dot(Span key, Span mean, Span x);

}  // namespace lla::reference
