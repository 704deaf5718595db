#include "common/gemm.hpp"

#include "cpu/targets.hpp"  // before Highway

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/gemm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace lla::experiments {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// kRows rows by two vectors of columns (or one), held in registers over the whole of k.
template <int kRows, bool kTwo, class D, class T = hn::TFromD<D>>
HWY_INLINE void Tile(D d, size_t k, T alpha, Strided<T> a, const T* HWY_RESTRICT b, size_t ldb, T beta,
                     T* HWY_RESTRICT c, size_t ldc) {
  const size_t lanes = hn::Lanes(d);
  hn::Vec<D> left[kRows], right[kRows];
  for (int r = 0; r < kRows; ++r) left[r] = right[r] = hn::Zero(d);
  for (size_t i = 0; i < k; ++i) {
    const auto b0 = hn::LoadU(d, b + i * ldb);
    const auto b1 = kTwo ? hn::LoadU(d, b + i * ldb + lanes) : b0;
    for (int r = 0; r < kRows; ++r) {
      const auto value = hn::Set(d, a.data[r * a.row + i * a.column]);
      left[r] = hn::MulAdd(value, b0, left[r]);
      if (kTwo) right[r] = hn::MulAdd(value, b1, right[r]);
    }
  }
  const auto store = [&](hn::Vec<D> sum, T* to) HWY_ATTR {
    sum = hn::Mul(sum, hn::Set(d, alpha));
    hn::StoreU(beta == T{0} ? sum : hn::MulAdd(hn::Set(d, beta), hn::LoadU(d, to), sum), d, to);
  };
  for (int r = 0; r < kRows; ++r) {
    store(left[r], c + r * ldc);
    if (kTwo) store(right[r], c + r * ldc + lanes);
  }
}

template <bool kTwo, class D, class T = hn::TFromD<D>>
HWY_INLINE void Panel(D d, size_t m, size_t k, T alpha, Strided<T> a, const T* b, size_t ldb, T beta, T* c,
                      size_t ldc) {
  size_t row = 0;
  const auto from = [&] { return Strided<T>{a.data + row * a.row, a.row, a.column}; };
  for (; row + 6 <= m; row += 6) Tile<6, kTwo>(d, k, alpha, from(), b, ldb, beta, c + row * ldc, ldc);
  for (; row < m; ++row) Tile<1, kTwo>(d, k, alpha, from(), b, ldb, beta, c + row * ldc, ldc);
}

template <class T>
HWY_INLINE void Gemm(size_t m, size_t n, size_t k, T alpha, Strided<T> a, const T* b, size_t ldb, T beta, T* c,
                     size_t ldc) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 4> few;
  const hn::CappedTag<T, 1> one;
  const size_t lanes = hn::Lanes(d);
  size_t j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) Panel<true>(d, m, k, alpha, a, b + j, ldb, beta, c + j, ldc);
  for (; j + lanes <= n; j += lanes) Panel<false>(d, m, k, alpha, a, b + j, ldb, beta, c + j, ldc);
  for (; j + hn::Lanes(few) <= n; j += hn::Lanes(few)) Panel<false>(few, m, k, alpha, a, b + j, ldb, beta, c + j, ldc);
  for (; j < n; ++j) Panel<false>(one, m, k, alpha, a, b + j, ldb, beta, c + j, ldc);
}

void GemmF32(size_t m, size_t n, size_t k, float alpha, Strided<float> a, const float* b, size_t ldb, float beta,
             float* c, size_t ldc) {
  Gemm(m, n, k, alpha, a, b, ldb, beta, c, ldc);
}
void GemmF64(size_t m, size_t n, size_t k, double alpha, Strided<double> a, const double* b, size_t ldb, double beta,
             double* c, size_t ldc) {
  Gemm(m, n, k, alpha, a, b, ldb, beta, c, ldc);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::experiments
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lla::experiments {
HWY_EXPORT(GemmF32);
HWY_EXPORT(GemmF64);

void gemm(size_t m, size_t n, size_t k, float alpha, Strided<float> a, const float* b, size_t ldb, float beta, float* c,
          size_t ldc) {
  HWY_DYNAMIC_DISPATCH(GemmF32)(m, n, k, alpha, a, b, ldb, beta, c, ldc);
}
void gemm(size_t m, size_t n, size_t k, double alpha, Strided<double> a, const double* b, size_t ldb, double beta,
          double* c, size_t ldc) {
  HWY_DYNAMIC_DISPATCH(GemmF64)(m, n, k, alpha, a, b, ldb, beta, c, ldc);
}

}  // namespace lla::experiments
#endif
