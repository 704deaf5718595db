// The models that are not attention over a key cache. Each takes one sequence, k and v (length, d) with q = k, and
// writes the squared error summed over the d outputs at every position, for both forms: `inclusive` lets position i see
// itself (the paper's set-up), `strict` only what came before.
#pragma once

#include <cstdint>

#include "common/random.hpp"

namespace lla::experiments {

struct Errors {
  double* inclusive;
  double* strict;
};

// Vanilla linear attention, the paper's H = I: the sum of v_j (k_j . q).
void linear_errors(int length, int d, const float* k, const float* v, Errors out);

// MesaNet: ridge regression on everything seen so far, exact (see models.cpp), in double.
void mesanet_errors(int length, int d, double ridge, const float* k, const float* v, Errors out);

// A guess from a linear map of its own, drawn afresh at every position: it knows the scale of the values and nothing
// else.
void random_errors(int length, int d, const Stream&, const float* k, const float* v, Errors out);

// Squared distance of a model's outputs (length, d) from v, per position.
void squared_errors(int length, int d, const float* o, const float* v, double* out);

}  // namespace lla::experiments
