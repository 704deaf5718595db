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
CheckInputs make_check_inputs(const CheckCase& c);

// One call, forward or backward.
struct CheckCall {
  std::string refused;  // why the implementation does not take the problem; empty when it does
  std::string failed;   // what went wrong in a call it did take
  bool done() const { return refused.empty() && failed.empty(); }
};

struct CheckResult {
  CheckCall forward, backward;
  std::vector<double> o, dq, dk, dv;
  std::vector<double> dridge;        // or dx where x is given
  std::vector<double> dridge_terms;  // of the reference: by token, head and dimension, before they are summed up
  std::vector<int32_t> forward_status, backward_status;  // lla_row_status of every row

  int64_t unsolved() const;  // rows that say so, forward or backward
};

// The reference: fp64, solved directly.
CheckResult run_reference(const CheckCase& c, const CheckInputs& inputs);
CheckResult run_implementation(const CheckCase& c, const CheckInputs& inputs,
                               const core::Implementation& implementation);

// Inputs as far off as roundings of the case's type may take them; conditioned cases are compared with what that does.
CheckInputs perturbed(const CheckCase& c, const CheckInputs& inputs);

// Zero where a call was not done.
struct CheckErrors {
  double output = 0;
  double gradients = 0;             // the worst of
  const char* worst_gradient = "";  // "dq", "dk", "dv", "dridge" or "dx"
};
// Relative norms. Of o, dq, dk and dv in the worst batch entry (or packed sequence) and head; in dq and dk the rounding
// of their largest intermediate is forgiven, since where weights are peaked they are tiny differences of large terms.
// Of dridge over the whole, relative to the terms it sums up: their signs differ, so the sum may be next to nothing.
// With `moved`, the reference on perturbed inputs, what it is off by is forgiven as well, and the accuracy of results
// some of whose rows report no solution: those must be finite.
CheckErrors check_errors(const CheckCase& c, const CheckInputs& inputs, const CheckResult& reference,
                         const CheckResult& result, const CheckResult* moved = nullptr);

}  // namespace lla::app
