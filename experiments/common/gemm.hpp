// Small dense products for the recurrent models: c = alpha a b + beta c, b and c with contiguous rows, a with any
// strides (so a transpose costs nothing). One thread; callers spread sequences over threads.
#pragma once

#include <cstddef>

namespace lla::experiments {

template <class T>
struct Strided {
  const T* data;
  size_t row, column;  // strides in elements
};

void gemm(size_t m, size_t n, size_t k, float alpha, Strided<float> a, const float* b, size_t ldb, float beta, float* c,
          size_t ldc);
void gemm(size_t m, size_t n, size_t k, double alpha, Strided<double> a, const double* b, size_t ldb, double beta,
          double* c, size_t ldc);

}  // namespace lla::experiments
