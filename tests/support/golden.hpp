// The golden cases: small fp64 problems with outputs by a direct solve and gradients by autograd, made outside this
// project's code.
#pragma once

#include <string>
#include <vector>

#include "support/run.hpp"

namespace lla::test {

struct GoldenCase {
  std::string name;
  Spec spec;  // f64
  Inputs inputs;
  std::vector<double> o;
  Backward gradients;
};

// Reads golden.bin from the folder LLA_TEST_DATA (default: the source tree's). Throws std::runtime_error when it
// cannot.
std::vector<GoldenCase> golden_cases();
std::string test_data_file(const std::string& name);

}  // namespace lla::test
