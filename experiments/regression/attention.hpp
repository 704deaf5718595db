// LLA and softmax attention of a batch of sequences with q = k, by one call of the library: softmax attention is the
// mean value v̄ the forward pass saves for the backward pass, so it costs nothing beside LLA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/device.hpp"
#include "regression/settings.hpp"

namespace lla::experiments {

// The solve stops at this relative residual. Ten times tighter than the library's default, so that the solver's error
// stays far below the smallest errors measured (docs/reproduce.md).
inline constexpr double kRegressionTolerance = 1e-4;

class Attention {
 public:
  // implementation: one of lla_implementation_name, or empty for the library's choice.
  Attention(DeviceMemory& memory, const RegressionSetting& setting, std::string implementation = "");

  // k, v, lla, softmax: host (batch, length, d). strict: position i sees j < i; position 0 sees nothing and gets 0.
  void run(int64_t batch, const float* k, const float* v, bool strict, float* lla, float* softmax);

 private:
  DeviceMemory& memory_;
  RegressionSetting setting_;
  std::string implementation_;
  DeviceBuffer k_, v_, o_, saved_, ridge_, workspace_;
  std::vector<float> host_saved_;
};

}  // namespace lla::experiments
