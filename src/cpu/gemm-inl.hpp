// The one matrix product of the CPU kernels: C[M x panel] = A[M x K] B[K x panel], A broadcast element by element, B
// one panel.
//
// A is read "k-major": element (i, k) lies at a[k * lda + i]. Rows of a matrix in its natural layout (row k holds all
// i) are that already; for products over channels (K = D) the packed copy holds packs of kPackRows rows transposed
// (pack.hpp).
#if defined(LLA_CPU_GEMM_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_GEMM_INL_HPP
#undef LLA_CPU_GEMM_INL_HPP
#else
#define LLA_CPU_GEMM_INL_HPP
#endif

#include <utility>

#include "cpu/pack.hpp"
#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// Rows of C held in registers: 2 * 12 accumulators of 32 registers, or 2 * 6 of 16.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_EMU128 || \
    HWY_TARGET == HWY_SCALAR
constexpr int kRows = 6;
#else
constexpr int kRows = 12;
#endif
static_assert(kPackRows % kRows == 0);

// One register block: rows [0, M) of C, given to epilogue(i, first vector, second vector).
template <int M, class T, class Epilogue>
HWY_INLINE void register_block(const T* HWY_RESTRICT a, int64_t lda, const T* HWY_RESTRICT b, int64_t k_count,
                               const Epilogue& epilogue) {
  Vec<T> c0[M], c1[M];
  for (int i = 0; i < M; ++i) c0[i] = c1[i] = hn::Zero(Tag<T>());
  for (int64_t k = 0; k < k_count; ++k) {
    const auto b0 = load(b);
    const auto b1 = load(b + kLanes<T>);
    for (int i = 0; i < M; ++i) {
      const auto ai = splat(a[i]);
      c0[i] = hn::MulAdd(ai, b0, c0[i]);
      c1[i] = hn::MulAdd(ai, b1, c1[i]);
    }
    a += lda;
    b += kPanel<T>;
  }
  for (int i = 0; i < M; ++i) epilogue(i, c0[i], c1[i]);
}

// Rows [lo, hi) of a transposed matrix times a panel b[channels x panel]; lo starts a pack. epilogue(j - lo, two
// vectors) is called up to the end of the last register block, so what it writes to needs room for a whole pack.
template <class T, class Epilogue>
HWY_INLINE void transposed_product(const T* transposed, int64_t channels, int64_t lo, int64_t hi, const T* b,
                                   const Epilogue& epilogue) {
  for (int64_t j = lo; j < hi; j += kRows) {
    const T* a = transposed + j / kPackRows * kPackRows * channels + j % kPackRows;
    register_block<kRows>(a, kPackRows, b, channels,
                          [&](int i, Vec<T> c0, Vec<T> c1) HWY_ATTR { epilogue(j - lo + i, c0, c1); });
  }
}

// c[channels x panel] += A B over `rows` rows of a natural matrix and as many of b.
template <int M, class T>
HWY_INLINE void add_block(const T* a, int64_t lda, const T* b, int64_t rows, T* c) {
  register_block<M>(a, lda, b, rows, [c](int i, Vec<T> c0, Vec<T> c1) HWY_ATTR {
    T* const to = c + i * kPanel<T>;
    store(hn::Add(load(to), c0), to);
    store(hn::Add(load(to + kLanes<T>), c1), to + kLanes<T>);
  });
}

template <int M, class T>
HWY_INLINE void add_last_block(int64_t m, const T* a, int64_t lda, const T* b, int64_t rows, T* c) {
  if constexpr (M > 0) {
    if (m == M) return add_block<M>(a, lda, b, rows, c);
    add_last_block<M - 1>(m, a, lda, b, rows, c);
  }
}

template <class T>
HWY_NOINLINE void natural_product(const T* natural, int64_t lda, int64_t channels, const T* b, int64_t rows, T* c) {
  int64_t i = 0;
  for (; i + kRows <= channels; i += kRows) add_block<kRows>(natural + i, lda, b, rows, c + i * kPanel<T>);
  add_last_block<kRows - 1>(channels - i, natural + i, lda, b, rows, c + i * kPanel<T>);
}

// sums[l] = sum over channels of a[c][l] b[c][l].
template <class T>
void lane_dots(const T* a, const T* b, int64_t channels, T* sums) {
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    auto sum = hn::Zero(Tag<T>());
    for (int64_t c = 0; c < channels; ++c)
      sum = hn::MulAdd(load(a + c * kPanel<T> + at), load(b + c * kPanel<T> + at), sum);
    store(sum, sums + at);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
