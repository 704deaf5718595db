// Runs a problem through the public C interface on one implementation: outputs and workspace poisoned with NaN, guard
// zones around everything, and a test failure where something else was written or an input changed.
#pragma once

#include <string>
#include <vector>

#include "support/problem.hpp"

namespace lla::test {

struct RowInfo {
  std::vector<int> iterations, status;
  std::vector<double> residual;
};

struct Forward {
  lla_status status = LLA_OK;
  std::string message;
  std::vector<double> o, saved;
  ForwardSizes sizes;  // where saved's sections are, if it was asked for
  RowInfo info;
};

struct Backward {
  lla_status status = LLA_OK;
  std::string message;
  std::vector<double> dq, dk, dv, dridge, dx;
  std::vector<double> dridge_terms;  // oracle only: what a scalar or per-head dridge is the sum of
  double dridge_summands = 0;        // and their norm
  RowInfo info;
};

// What is asked for besides the main outputs.
struct Want {
  bool saved = true;
  bool info = true;
};

// Which gradients are asked for; of ridge and x the one the problem has.
struct WantGradients {
  bool q = true;
  bool k = true;
  bool v = true;
  bool ridge_or_x = true;
  bool info = true;
};

Forward run_forward(const Spec& spec, const Inputs& inputs, const std::string& implementation, Want want = {});
// Takes the saved vector of a forward call, by default of one it runs itself on the same implementation.
Backward run_backward(const Spec& spec, const Inputs& inputs, const std::string& implementation);
Backward run_backward(const Spec& spec, const Inputs& inputs, const std::vector<double>& saved,
                      const std::string& implementation, WantGradients want = {});

// The oracle: the reference's direct solve on the same values, in and out in fp64. as_oracle is the problem it solves.
Spec as_oracle(Spec spec);
Forward oracle_forward(const Spec& spec, const Inputs& inputs);
Backward oracle_backward(const Spec& spec, const Inputs& inputs);

// Where the sections of the saved vector are.
ForwardSizes saved_layout(const Spec& spec);

// Implementations whose memory this binary has and whose device is there, in order of preference.
std::vector<std::string> implementations_under_test();
Memory& memory_of(const std::string& implementation);
// Whether the implementation runs the problem (and its backward pass). A GPU's may refuse; a refusal by the CPU's is a
// test failure.
bool takes(const std::string& implementation, const Spec& spec, bool gradients = true);

// Fewer and smaller cases (LLA_TEST_REDUCED=1), for runs under sanitizers.
bool reduced();

}  // namespace lla::test
