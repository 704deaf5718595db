// The pieces of the kernels on each SIMD target: exp2, the matrix product, products in double, the factorisation.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_test.cpp"
#include "cpu/targets.hpp"
#include "hwy/foreach_target.h"  // after it everything below is seen once per target

#include <vector>

#include "cpu/direct-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

template <class T>
void exp2_array(const std::vector<T>& x, std::vector<T>& y) {
  for (size_t i = 0; i < x.size(); i += kLanes<T>) store(exp2_lanes(load(x.data() + i)), y.data() + i);
}
void exp2_f32(const std::vector<float>& x, std::vector<float>& y) { exp2_array(x, y); }
void exp2_f64(const std::vector<double>& x, std::vector<double>& y) { exp2_array(x, y); }

// rows x channels matrix, [rows][panel] and [channels][panel] results of both products with b.
void products_f32(int64_t rows, int64_t channels, const std::vector<float>& matrix, std::vector<float>& grouped_result,
                  std::vector<float>& natural_result) {
  const int64_t padded = round_up(rows, kPackRows), panel = kPanel<float>;
  std::vector<float> natural(padded * channels), transposed(padded * channels);
  const PackedRows<float> packed{natural.data(), transposed.data()};
  for (int64_t r = 0; r < padded; ++r) {
    if (r < rows) {
      packed.put(r, channels, matrix.data() + r * channels);
    } else {
      packed.put_zero(r, channels);
    }
  }
  std::vector<float> b(std::max(rows, channels) * panel);
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 7) - 3;
  grouped_result.assign(padded * panel, 0);
  transposed_product(transposed.data(), channels, 0, rows, b.data(),
                     [&](int64_t j, Vec<float> v0, Vec<float> v1) HWY_ATTR {
                       store(v0, grouped_result.data() + j * panel);
                       store(v1, grouped_result.data() + j * panel + kLanes<float>);
                     });
  natural_result.assign(channels * panel, 1);  // added to
  natural_product(natural.data(), channels, channels, b.data(), rows, natural_result.data());
}

int64_t panel_f32() { return kPanel<float>; }
int64_t panel_f64() { return kPanel<double>; }

// `again` is solved for with the factors.
void factor(int64_t n, std::vector<double>& triangle, std::vector<double>& diagonal, std::vector<double>& solution,
            std::vector<double>& again, bool* dropped) {
  std::vector<double> inverse(solution.size());
  factor_and_solve(triangle.data(), n, diagonal.data(), solution.data(), inverse.data(), dropped);
  solve_again(triangle.data(), n, inverse.data(), again.data());
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <cmath>

#include "each_target.hpp"

namespace lla::cpu {
namespace {

HWY_EXPORT(exp2_f32);
HWY_EXPORT(exp2_f64);
HWY_EXPORT(products_f32);
HWY_EXPORT(panel_f32);
HWY_EXPORT(panel_f64);
HWY_EXPORT(factor);

// Units in the last place between a result and the exact value.
template <class T>
double ulps(T got, long double want) {
  const T nearest = static_cast<T>(want);
  const long double unit = std::nextafter(nearest, std::numeric_limits<T>::infinity()) - nearest;
  return static_cast<double>(std::abs((static_cast<long double>(got) - want) / unit));
}

TEST(Exp2, IsWithinTwoUnitsAndFlushesBelowTheNormalRange) {
  test::on_each_target([](const char* target) {
    std::vector<float> x, y;
    for (int i = 0; i < 4096; ++i) x.push_back(-126.0f * static_cast<float>(i) / 4095);
    y.resize(x.size());
    HWY_DYNAMIC_DISPATCH(exp2_f32)(x, y);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_LE(ulps(y[i], exp2l(x[i])), 2) << target << " 2^" << x[i];
    std::vector<double> xd, yd;
    for (int i = 0; i < 4096; ++i) xd.push_back(-1022.0 * i / 4095);
    yd.resize(xd.size());
    HWY_DYNAMIC_DISPATCH(exp2_f64)(xd, yd);
    for (size_t i = 0; i < xd.size(); ++i) EXPECT_LE(ulps(yd[i], exp2l(xd[i])), 4) << target << " 2^" << xd[i];
    std::vector<float> low(64, -1e30f), zero(64, 1);
    low[0] = -127;
    low[1] = -std::numeric_limits<float>::infinity();
    low[2] = std::numeric_limits<float>::quiet_NaN();
    HWY_DYNAMIC_DISPATCH(exp2_f32)(low, zero);
    for (float v : zero) EXPECT_EQ(v, 0.0f) << target;
  });
}

TEST(Products, AreExactOnSmallIntegersForEveryTail) {
  test::on_each_target([](const char* target) {
    const int64_t panel = HWY_DYNAMIC_DISPATCH(panel_f32)();
    for (const int64_t rows : {1, 5, 12, 13, 31}) {
      for (int64_t channels = 1; channels <= 26; ++channels) {
        std::vector<float> matrix(rows * channels), transposed, natural;
        for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<float>(i % 5) - 2;
        HWY_DYNAMIC_DISPATCH(products_f32)(rows, channels, matrix, transposed, natural);
        const auto b = [&](int64_t i, int64_t lane) { return static_cast<float>((i * panel + lane) % 7) - 3; };
        for (int64_t lane = 0; lane < panel; ++lane) {
          for (int64_t r = 0; r < rows; ++r) {
            float want = 0;
            for (int64_t c = 0; c < channels; ++c) want += matrix[r * channels + c] * b(c, lane);
            ASSERT_EQ(transposed[r * panel + lane], want) << target << " " << rows << " x " << channels;
          }
          for (int64_t c = 0; c < channels; ++c) {
            float want = 1;
            for (int64_t r = 0; r < rows; ++r) want += matrix[r * channels + c] * b(r, lane);
            ASSERT_EQ(natural[c * panel + lane], want) << target << " " << rows << " x " << channels;
          }
        }
      }
    }
  });
}

// A = L L^T for a simple L, another right-hand side a lane; lane 1 is rank deficient.
TEST(Factorisation, SolvesEachLaneAndDropsVanishingPivots) {
  test::on_each_target([](const char* target) {
    const int64_t lanes = HWY_DYNAMIC_DISPATCH(panel_f64)();
    for (const int64_t n : {1, 2, 5, 18}) {
      std::vector<double> triangle, diagonal, solution(n * lanes), full(n * n);
      for (int64_t a = 0; a < n; ++a) {
        for (int64_t b = 0; b < n; ++b)
          full[a * n + b] = (a == b ? 2.0 * n : 0.0) + 1.0 / static_cast<double>(1 + a + b);
      }
      for (int64_t a = 0; a < n; ++a) {
        for (int64_t b = a; b < n; ++b) {
          for (int64_t l = 0; l < lanes; ++l) triangle.push_back(l == 1 ? 1.0 : full[a * n + b]);  // lane 1: all ones
        }
        for (int64_t l = 0; l < lanes; ++l) {
          diagonal.push_back(l == 1 ? 1.0 : full[a * n + a]);
          for (int64_t c = 0; c < n; ++c)
            solution[a * lanes + l] += (l == 1 ? 1.0 : full[a * n + c]) * static_cast<double>(c + l);
        }
      }
      std::vector<char> dropped(lanes, 0);
      std::vector<double> again = solution;
      for (double& value : again) value *= 2;
      HWY_DYNAMIC_DISPATCH(factor)(n, triangle, diagonal, solution, again, reinterpret_cast<bool*>(dropped.data()));
      for (int64_t l = 0; l < lanes; ++l) {
        double sum = 0;
        for (int64_t a = 0; a < n; ++a) {
          ASSERT_TRUE(std::isfinite(solution[a * lanes + l])) << target;
          sum += solution[a * lanes + l];
          EXPECT_NEAR(again[a * lanes + l], 2 * solution[a * lanes + l], 1e-10) << target << " n " << n;
          if (l != 1) {
            EXPECT_NEAR(solution[a * lanes + l], static_cast<double>(a + l), 1e-11) << target << " n " << n;
          }
        }
        EXPECT_EQ(dropped[l] != 0, l == 1 && n > 1) << target << " n " << n << " lane " << l;
        if (l == 1) {
          const auto whole = n * (n - 1) / 2 + n;
          EXPECT_NEAR(sum, static_cast<double>(whole), 1e-11) << target << " n " << n;
        }
      }
    }
  });
}

}  // namespace
}  // namespace lla::cpu
#endif
