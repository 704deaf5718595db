// The models that are not attention over a key cache. Each takes one sequence, (length, d) arrays, and writes the
// squared error summed over the d outputs at every position, for both forms: `inclusive` lets position i see itself
// (the paper's set-up), `strict` only what came before.
#pragma once

#include <cstdint>

#include "regression/data.hpp"

namespace lla::experiments {

struct Errors {
  double* inclusive;
  double* strict;
};

// Vanilla linear attention, the paper's H = I: the sum of v_j (k_j . q).
void linear_errors(int length, int d, const Sequence&, Errors out);

// MesaNet: ridge regression on everything seen so far, exact (see models.cpp), in double.
void mesanet_errors(int length, int d, double ridge, const Sequence&, Errors out);

// A guess from a linear map of its own, drawn afresh at every position: it knows the scale of the values and nothing
// else.
void random_errors(int length, int d, const Stream&, const Sequence&, Errors out);

// Squared distance of a model's outputs (length, d) from the targets, per position.
void squared_errors(int length, int d, const float* o, const float* target, double* out);

}  // namespace lla::experiments
