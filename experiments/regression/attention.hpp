// Errors of LLA and softmax attention on a batch of sequences, by the library: softmax attention is the mean value v̄
// the forward pass saves for the backward pass, so it costs nothing beside LLA. On a GPU the errors are summed there,
// and everything is enqueued: the host makes the next batch meanwhile.
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

  // Host arrays (count, length, d).
  struct Batch {
    int64_t count;
    const float *k, *v, *q, *target;
  };

  // Begins the errors of LLA with each ridge and of softmax attention, in both forms. The arrays must stay until
  // finish(). strict: position i sees j < i; position 0 sees nothing and predicts 0.
  void start(const Batch&, const std::vector<double>& ridges, int threads);
  void finish();
  // Squared errors of a sequence by position. series: the place of the ridge, or their number for softmax attention.
  const double* errors(bool strict, size_t series, int64_t sequence) const;

  // The outputs themselves, (count, length, d), for tests.
  void outputs(const Batch&, double ridge, bool strict, float* lla, float* softmax);

 private:
  struct Outputs {  // where they are, on the device; position `first` of a sequence comes first
    const float *lla, *softmax;
    int64_t lla_stride, softmax_stride;  // from a sequence to the next
    int64_t first;
  };
  void place(const Batch&, const std::vector<double>& ridges);
  Outputs forward(size_t ridge, bool strict);
  int64_t error_offset(bool strict, size_t series, int64_t sequence) const;

  DeviceMemory& memory_;
  RegressionSetting setting_;
  std::string implementation_;
  int64_t dim_;  // of the keys the library sees
  Batch batch_{};
  size_t series_ = 0;
  const float *k_data_ = nullptr, *q_data_ = nullptr, *v_data_ = nullptr, *target_data_ = nullptr,
              *ridge_data_ = nullptr;
  DeviceBuffer k_, q_, v_, target_, o_, saved_, ridge_, workspace_, device_errors_;
  DeviceBuffer host_k_, host_q_, host_ridge_, host_errors_;
  const double* errors_ = nullptr;
};

}  // namespace lla::experiments
