// Peak resident memory of a piece of code, from the kernel's own high-water mark.
#pragma once

#include <functional>

namespace lla::experiments {

struct Cost {
  double seconds;
  double peak_bytes;  // above what was resident before
};

// Runs f once. Throws Failure where /proc does not offer a resettable high-water mark.
Cost measure_cost(const std::function<void()>& f);

}  // namespace lla::experiments
