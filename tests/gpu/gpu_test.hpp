// Tests on a GPU: its memory, and a fixture that runs each CUDA implementation by name and skips, with the reason,
// where there is no device or the implementation does not take the problem.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "plan/machine.hpp"
#include "support/compare.hpp"
#include "support/gates.hpp"
#include "support/run.hpp"

namespace lla::test {

// The device under test (LLA_TEST_DEVICE, default 0); present is false, with the reason, where there is none.
const core::CudaDevice& gpu();
int gpu_index();
std::unique_ptr<Memory> make_cuda_memory();

// Names of the CUDA implementations of this build, whether or not a device is there.
std::vector<std::string> cuda_implementations();

class OnGpu : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  }
  const std::string& implementation() const { return GetParam(); }
  bool takes(const Spec& spec) const { return test::takes(implementation(), spec); }
};

#define LLA_EACH_CUDA_IMPLEMENTATION(suite)                                       \
  INSTANTIATE_TEST_SUITE_P(Gpu, suite, testing::ValuesIn(cuda_implementations()), \
                           [](const auto& info) { return test_name(info.param); })

// Ends the test where the implementation refuses the problem.
#define LLA_SKIP_UNLESS_TAKEN(spec) \
  if (!takes(spec)) GTEST_SKIP() << implementation() << " does not take it: " << lla_last_error()

// The residual that a row which says OK may report. Tensor cores multiply numbers of eleven bits: there the report
// contains what their rounding may hide, and a row is OK up to ten times the tolerance, or 1e-3 (docs/math.md).
inline double most_told(const std::string& implementation, const Spec& spec) {
  return implementation == "sm90" ? 10 * std::max(spec.tolerance(), 1e-3) : 1.001 * spec.tolerance();
}

// The fp64 truth for lengths the CPU reference is too slow for: the portable kernels' direct solve in double, held to
// the reference by tests of their own.
Forward gpu_oracle_forward(const Spec& spec, const Inputs& inputs);
Backward gpu_oracle_backward(const Spec& spec, const Inputs& inputs);

}  // namespace lla::test
