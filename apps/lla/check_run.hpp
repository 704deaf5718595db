// Runs one case of `lla check` on one implementation, and measures how far two results are apart.
#pragma once

#include <string>
#include <vector>

#include "check_cases.hpp"
#include "plan/implementation.hpp"

namespace lla::app {

// Row-major, in double, rounded to what the case's dtype holds.
struct CheckInputs {
  std::vector<double> q, k, v, ridge, x, grad_o;
};
CheckInputs make_check_inputs(const CheckCase& c, uint64_t seed);

// One call, forward or backward.
struct CheckCall {
  std::string refused;  // why the implementation does not take the problem; empty when it does
  std::string failed;   // what went wrong in a call it did take
  bool done() const { return refused.empty() && failed.empty(); }
};

struct CheckResult {
  CheckCall forward, backward;
  std::vector<double> o, dq, dk, dv;
  std::vector<double> dridge;  // or dx where x is given
};

// The reference: fp64, solved directly.
CheckResult run_reference(const CheckCase& c, const CheckInputs& inputs);
CheckResult run_implementation(const CheckCase& c, const CheckInputs& inputs, const core::Implementation& implementation);

// Zero where a call was not done.
struct CheckErrors {
  double output = 0;
  double gradients = 0;             // the worst of
  const char* worst_gradient = "";  // "dq", "dk", "dv", "dridge" or "dx"
};
// Relative norms: of o, dq, dk, dv in the worst batch entry (or packed sequence) and head, of dridge over the whole.
CheckErrors check_errors(const CheckCase& c, const CheckResult& reference, const CheckResult& result);

}  // namespace lla::app
