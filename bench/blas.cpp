#include "bench/blas.hpp"

#include <chrono>
#include <thread>

#if LLA_HAVE_OPENBLAS
#include <cblas.h>
#endif

namespace lla::bench {

#if LLA_HAVE_OPENBLAS

bool have_blas() { return true; }
std::string blas_kernels() { return openblas_get_corename(); }

BlasYardstick::BlasYardstick(int threads) : a_(kSize * kSize, 0.5f), b_(kSize * kSize, 0.25f), c_(kSize * kSize) {
  openblas_set_num_threads(threads);
}

double BlasYardstick::gflops() {
  const auto start = std::chrono::steady_clock::now();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1.0f, a_.data(), kSize, b_.data(), kSize,
              0.0f, c_.data(), kSize);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  // OpenBLAS's idle threads spin for up to 2^28 ticks before they sleep; what is measured next needs their cores.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return 2.0 * kSize * kSize * kSize / seconds.count() * 1e-9;
}

#else

bool have_blas() { return false; }
std::string blas_kernels() { return {}; }
BlasYardstick::BlasYardstick(int) {}
double BlasYardstick::gflops() { return 0; }

#endif

}  // namespace lla::bench
