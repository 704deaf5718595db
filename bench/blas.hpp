// The yardstick: single-precision matrix products of a good BLAS on the same threads.
#pragma once

#include <cstdint>
#include <vector>

namespace lla::bench {

bool have_blas();

// One product of 2048 x 2048 matrices; keeps its matrices so that repeats measure nothing else.
class BlasYardstick {
 public:
  explicit BlasYardstick(int threads);
  double gflops();  // of one product, now

 private:
  static constexpr int64_t kSize = 2048;
  std::vector<float> a_, b_, c_;
};

}  // namespace lla::bench
