// Matrix products as different hardware would do them: operands rounded to a type, sums in fp32 (fp64 for the exact
// one).
#pragma once

#include <array>

namespace lla::experiments {

enum class Arithmetic { f64, f32, f16, bf16 };
inline constexpr std::array<const char*, 4> kArithmeticNames = {"fp64", "fp32", "fp16", "bf16"};

// x as an operand. `bound` is known to be at least |x|: fp16 scales by the power of two that brings it to 2^15, so that
// neither overflow nor, down to 2^-29 of the bound, lost bits come in the way.
double as_operand(Arithmetic, double x, double bound);

}  // namespace lla::experiments
