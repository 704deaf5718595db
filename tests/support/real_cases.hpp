// Heads of a language model in training (tests/golden/cases.bin, written by tools/make_cases.py): bf16 inputs and
// gradients, causal, a ridge by token.
#pragma once

#include <string>
#include <vector>

#include "support/problem.hpp"

namespace lla::test {

struct RealCase {
  std::string name;
  Spec spec;  // bf16, D = 64, defaults otherwise
  Inputs inputs;
};

// Throws std::runtime_error when the file cannot be read.
std::vector<RealCase> real_cases();

// The last `rows` queries of a head's first `keys` keys, as decoding sees them.
Inputs last_rows(const RealCase& head, int64_t rows, int64_t keys);

}  // namespace lla::test
