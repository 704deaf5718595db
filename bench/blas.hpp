// The yardstick: single-precision matrix products of a good BLAS on the same threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lla::bench {

bool have_blas();
// Whose kernels it chose for this processor, which need not be the widest that it has: OpenBLAS knows processors by
// name, and takes those of an older one for what is newer than itself.
std::string blas_kernels();

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
