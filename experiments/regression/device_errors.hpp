// Squared errors of outputs that are in a GPU's memory, summed there. In a build without CUDA it is never reached.
#pragma once

#include <cstdint>

#include "common/device.hpp"

namespace lla::experiments {

// For every sequence and row: the squared distance of the output from its target, both (rows, d) with contiguous rows.
struct ErrorRows {
  int64_t sequences, rows, d;
  const float* output;
  int64_t output_stride;  // from a sequence to the next
  const float* target;
  int64_t target_stride;
  double* errors;  // (rows)
  int64_t errors_stride;
};

void device_squared_errors(DeviceMemory&, const ErrorRows&);

}  // namespace lla::experiments
