// The check a CUDA case must pass before it is timed.
#pragma once

#include <string>
#include <vector>

#include "bench/cuda_call.hpp"

namespace lla::bench {

// Relative norms, and what is promised for the case: of o (forward) or of the worst gradient (backward).
double accuracy_gate(const CudaCase& c);
double row_gate(const CudaCase& c);  // of single rows of o in the case's own type

// Whether fp64 results of one hold for the other.
bool same_problem(const CudaCase& a, const CudaCase& b);

struct NamedOutput {
  const char* name;
  std::vector<double> values;
};
using Outputs = std::vector<NamedOutput>;  // o, or the gradients

// One head of the case, shortened to a length that fp64 can follow.
CudaCase one_head(const CudaCase& c);
Outputs exact_head(const CudaCase& head, const CudaInputs& inputs);  // the portable kernels' direct solve in double
// fp32 results of 16-bit inputs: the outputs' own rounding is not what is checked.
Outputs computed_head(const CudaCase& head, const CudaInputs& inputs);

// Rows of o spread over heads and positions.
std::vector<std::vector<double>> exact_rows(const CudaCase& c, const CudaInputs& inputs);  // by the CPU reference
std::vector<std::vector<double>> sampled_rows(const CudaCase& c, const std::vector<double>& o);

double relative_error(const std::vector<double>& got, const std::vector<double>& want);

}  // namespace lla::bench
