// The floating-point environment the library computes in: rounding to nearest, subnormal numbers kept, no traps. A
// caller's own (torch.set_flush_denormal, a rounding mode, feenableexcept) belongs to its thread alone; with it results
// would depend on which thread computed them, and a masked-out lane's division would end the process.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace lla::core {

// The default one as long as this lives, then the caller's again, flags included.
class FloatEnvironment {
 public:
#if defined(__SSE2__)
  // Everything here is compiled to SSE and its successors, which this register rules; asking for it costs nothing.
  FloatEnvironment() : callers_(_mm_getcsr()) {
    if (callers_ != kDefault) _mm_setcsr(kDefault);
  }
  ~FloatEnvironment() { _mm_setcsr(callers_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // every exception masked
  unsigned callers_;
#else
  FloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&callers_); }

 private:
  std::fenv_t callers_;
#endif

 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace lla::core
