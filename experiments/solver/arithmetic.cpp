#include "solver/arithmetic.hpp"

#include <cmath>

#include "core/convert.hpp"

namespace lla::experiments {

double as_operand(Arithmetic arithmetic, double x, double bound) {
  switch (arithmetic) {
    case Arithmetic::f64: return x;
    case Arithmetic::f32: return static_cast<float>(x);
    case Arithmetic::bf16: return core::to_float(core::to_bf16(static_cast<float>(x)));
    case Arithmetic::f16: {
      int exponent = 0;
      std::frexp(bound, &exponent);
      if (bound == 0 || !std::isfinite(bound)) exponent = 0;
      return std::ldexp(core::to_float(core::to_f16(static_cast<float>(std::ldexp(x, 15 - exponent)))), exponent - 15);
    }
  }
  return x;
}

}  // namespace lla::experiments
