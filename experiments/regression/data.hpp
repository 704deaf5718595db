// Piecewise linear data: segment c draws its keys from a Gaussian folded into its own cone, its values from its own
// linear map.
#pragma once

#include <cstdint>
#include <vector>

#include "common/random.hpp"
#include "regression/settings.hpp"

namespace lla::experiments {

// What is drawn for one sequence, each from its own stream.
enum class Draw : uint64_t { keys, maps, noise, predictor, queries };
Stream stream(const RegressionSetting&, int64_t sequence, Draw);

// One sequence: keys and values, queries and what they are to be answered with, each (length, d). Where the setting has
// no query noise, q and target are the keys and values themselves.
struct Sequence {
  float *k, *v, *q, *target;
};

// Not shared between threads: it keeps room for one segment's map.
class PiecewiseLinear {
 public:
  explicit PiecewiseLinear(const RegressionSetting&);
  void generate(int64_t sequence, const Sequence& out);

 private:
  void shape(float* x) const;  // folds into the cones and normalises

  RegressionSetting setting_;
  int sign_bits_;
  std::vector<float> map_;  // A_c transposed
};

}  // namespace lla::experiments
