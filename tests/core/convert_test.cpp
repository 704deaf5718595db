// Conversions between storage types. The oracle is the definition: the nearest representable value, ties to the even
// pattern.
#include "core/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace lla::core {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Walks every pair of neighbouring finite positive values and checks what lies between them.
template <class T, class Round>
void expect_nearest_even(uint16_t infinity, Round round) {
  for (uint16_t bits = 0; bits + 1 < infinity; ++bits) {
    const double low = to_float(T{bits});
    const double high = to_float(T{static_cast<uint16_t>(bits + 1)});
    ASSERT_LT(low, high);
    const double middle = (low + high) / 2;
    const uint16_t even = bits % 2 == 0 ? bits : static_cast<uint16_t>(bits + 1);
    ASSERT_EQ(round(low).bits, bits);
    ASSERT_EQ(round(middle).bits, even) << middle;
    ASSERT_EQ(round(std::nextafter(middle, 0.0)).bits, bits) << middle;
    ASSERT_EQ(round(std::nextafter(middle, 1e300)).bits, bits + 1) << middle;
    ASSERT_EQ(round(-middle).bits, even | 0x8000) << middle;
  }
}

f16 double_to_f16(double x) { return to_f16(round_to_odd(x)); }
bf16 double_to_bf16(double x) { return to_bf16(round_to_odd(x)); }

TEST(Convert, F16IsNearestEven) { expect_nearest_even<f16>(0x7C00, double_to_f16); }
TEST(Convert, Bf16IsNearestEven) { expect_nearest_even<bf16>(0x7F80, double_to_bf16); }

TEST(Convert, F16FromFloatIsNearestEven) {
  for (uint16_t bits = 0; bits + 1 < 0x7C00; ++bits) {
    const float middle = (to_float(f16{bits}) + to_float(f16{static_cast<uint16_t>(bits + 1)})) / 2;  // exact in float
    ASSERT_EQ(to_f16(middle).bits, bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(to_f16(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(to_f16(std::nextafter(middle, kInf)).bits, bits + 1);
  }
}

TEST(Convert, F16Edges) {
  EXPECT_EQ(to_f16(65504.0f).bits, 0x7BFF);
  EXPECT_EQ(to_f16(std::nextafter(65520.0f, 0.0f)).bits, 0x7BFF);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7C00);
  EXPECT_EQ(to_f16(-kInf).bits, 0xFC00);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_f16(0x1p-24f).bits, 1);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0);  // a tie, to even
  EXPECT_EQ(to_f16(0x1.8p-25f).bits, 1);
}

TEST(Convert, Bf16Edges) {
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(to_bf16(kInf).bits, 0x7F80);
  EXPECT_EQ(to_bf16(-0.0f).bits, 0x8000);
  EXPECT_EQ(double_to_bf16(1e300).bits, 0x7F80);
}

TEST(Convert, NanStaysNan) {
  for (const uint32_t bits : {0x7F800001u, 0x7FC00000u, 0xFFFFFFFFu, 0x7F80FFFFu}) {
    float nan;
    std::memcpy(&nan, &bits, sizeof(nan));
    EXPECT_TRUE(std::isnan(to_float(to_f16(nan)))) << std::hex << bits;
    EXPECT_TRUE(std::isnan(to_float(to_bf16(nan)))) << std::hex << bits;
  }
  EXPECT_TRUE(std::isnan(to_float(f16{0x7C01})));
  EXPECT_TRUE(std::isnan(round_to_odd(static_cast<double>(kNan))));
}

TEST(Convert, LoadAndStoreAgree) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    double storage[4] = {};
    store(storage, dtype, 3, 1.5);
    store(storage, dtype, 2, -0.25);
    EXPECT_EQ(load(storage, dtype, 3), 1.5);
    EXPECT_EQ(load(storage, dtype, 2), -0.25);
    EXPECT_EQ(load(storage, dtype, 0), 0);
  }
}

}  // namespace
}  // namespace lla::core
