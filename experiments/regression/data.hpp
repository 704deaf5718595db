// Piecewise linear data: segment c draws its keys from a Gaussian folded into its own cone, its values from its own
// linear map.
#pragma once

#include <cstdint>
#include <vector>

#include "common/random.hpp"
#include "regression/settings.hpp"

namespace lla::experiments {

// What is drawn for one sequence, each from its own stream.
enum class Draw : uint64_t { keys, maps, noise, predictor };
Stream stream(const RegressionSetting&, int64_t sequence, Draw);

// k and v (length, d) of one sequence. Not shared between threads: it keeps room for one segment's map.
class PiecewiseLinear {
 public:
  explicit PiecewiseLinear(const RegressionSetting&);
  void generate(int64_t sequence, float* k, float* v);

 private:
  RegressionSetting setting_;
  int sign_bits_;
  std::vector<float> map_;  // A_c transposed
};

}  // namespace lla::experiments
