// CuTe's names for warpgroup products.
#pragma once

#include <cuda_runtime.h>

namespace cute::SM90::GMMA {

enum class Major { K = 0, MN = 1 };
enum class ScaleOut { Zero = 0, One = 1 };
enum class ScaleIn { Neg = -1, One = 1 };

namespace emulated_detail {
struct Collector {
  emulated::GroupProduct product{};
  int count = 0;
  void take(float& c) { product.c[count++] = &c; }
  void take(ScaleOut scale) { product.add = scale == ScaleOut::One; }
};
template <int kColumns, bool kBf16, bool kRegisters, Major kA, Major kB, ScaleIn kSign>
struct Product {
  template <class... Rest>
  static void fma(uint64_t a, uint64_t b, Rest&&... rest) requires(!kRegisters) {
    Collector all;
    all.product.a_descriptor = a;
    issue(all, b, rest...);
  }
  template <class... Rest>
  static void fma(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, Rest&&... rest) requires kRegisters {
    Collector all;
    const uint32_t a[4] = {a0, a1, a2, a3};
    for (int i = 0; i < 4; ++i) all.product.a[i] = a[i];
    issue(all, b, rest...);
  }

 private:
  template <class... Rest>
  static void issue(Collector& all, uint64_t b, Rest&... rest) {
    emulated::GroupProduct& p = all.product;
    p.columns = kColumns, p.bf16 = kBf16, p.a_in_registers = kRegisters;
    p.a_across = kA == Major::MN, p.b_across = kB == Major::MN;
    p.negative = kSign == ScaleIn::Neg, p.add = true, p.b_descriptor = b;
    (all.take(rest), ...);
    if (all.count != kColumns / 2) emulated::fail("a warpgroup product with another number of sums");
    emulated::issue(p);
  }
};
}  // namespace emulated_detail

#define LLA_EMULATED_PRODUCTS(N)                                                                 \
  template <Major kA, Major kB, ScaleIn kSign = ScaleIn::One>                                    \
  using MMA_64x##N##x16_F32F16F16_SS = emulated_detail::Product<N, false, false, kA, kB, kSign>; \
  template <Major kA, Major kB, ScaleIn kSign = ScaleIn::One>                                    \
  using MMA_64x##N##x16_F32F16F16_RS = emulated_detail::Product<N, false, true, kA, kB, kSign>;  \
  template <Major kA, Major kB, ScaleIn kSign = ScaleIn::One>                                    \
  using MMA_64x##N##x16_F32BF16BF16_RS = emulated_detail::Product<N, true, true, kA, kB, kSign>;
LLA_EMULATED_PRODUCTS(64)
LLA_EMULATED_PRODUCTS(72)
LLA_EMULATED_PRODUCTS(80)
LLA_EMULATED_PRODUCTS(128)
LLA_EMULATED_PRODUCTS(136)
#undef LLA_EMULATED_PRODUCTS

}  // namespace cute::SM90::GMMA
