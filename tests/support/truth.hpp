// What a row's solution is worth, worked out in fp64 from the saved x.
#pragma once

#include <vector>

#include "support/problem.hpp"

namespace lla::test {

// x of a saved vector: (rows, dim).
std::vector<double> saved_x(const Spec& spec, const std::vector<double>& saved);

// |b - A x| / |b| of every row, in the order of the info outputs; 0 where there is nothing to solve. Not for packed
// sequences.
std::vector<double> true_residuals(const Spec& spec, const Inputs& inputs, const std::vector<double>& saved);

}  // namespace lla::test
