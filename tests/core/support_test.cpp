// The test support itself: it must notice what it claims to notice.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/compare.hpp"
#include "support/golden.hpp"

namespace lla::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Layout kLayouts[] = {Layout::dense, Layout::head_major, Layout::padded, Layout::scattered};

TEST(TestTensor, HoldsItsValuesInEveryLayoutAndType) {
  std::vector<double> values;
  for (int i = 0; i < 2 * 3 * 4 * 5; ++i) values.push_back(i - 60);
  for (const Layout layout : kLayouts) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i32}) {
      const TestTensor t(host_memory(), "t", dtype, {2, 3, 4, 5}, layout, values);
      EXPECT_EQ(t.values(), values) << name(layout);
      t.expect_intact();
    }
  }
}

TEST(TestTensor, OutputsStartAsNan) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const TestTensor t(host_memory(), "t", dtype, {3, 4});
    for (double value : t.values()) EXPECT_TRUE(std::isnan(value));
    t.expect_untouched();
  }
}

TEST(TestTensor, NoticesAChangedInput) {
  static const TestTensor t(host_memory(), "t", DType::f32, {4}, Layout::dense, {1, 2, 3, 4});
  static_cast<float*>(t.view().data)[2] = 7;
  EXPECT_NONFATAL_FAILURE(t.expect_intact(), "an input was changed");
}

TEST(TestTensor, NoticesAWriteBetweenTheElements) {
  static const TestTensor t(host_memory(), "t", DType::f32, {4}, Layout::scattered);
  static_cast<float*>(t.view().data)[2] = 7;  // an element
  t.expect_intact();
  EXPECT_NONFATAL_FAILURE(t.expect_untouched(), "was written to");
  static_cast<float*>(t.view().data)[3] = 7;  // a gap
  EXPECT_NONFATAL_FAILURE(t.expect_intact(), "between its elements");
}

TEST(TestTensor, NoticesAWriteBeforeAndBehind) {
  static const TestTensor before(host_memory(), "t", DType::f32, {4});
  static const TestTensor behind(host_memory(), "t", DType::f32, {4});
  static_cast<float*>(before.view().data)[-1] = 0;
  EXPECT_NONFATAL_FAILURE(before.expect_intact(), "outside its memory");
  std::memset(static_cast<char*>(behind.view().data) + 16, 0, 1);
  EXPECT_NONFATAL_FAILURE(behind.expect_intact(), "outside its memory");
}

TEST(Compare, TakesTheWorstHeadAndTheWorstRow) {
  Spec spec = self_attention(2, 1, 2);  // two positions, two heads, one channel
  const std::vector<double> want = {3, 1, 4, 1};
  const Error error = compare(spec, Side::queries, 1, {3, 1.5, 4, 1}, want);  // head 1, row 0 is off by 0.5
  EXPECT_NEAR(error.norm, 0.5 / std::sqrt(2), 1e-15);
  EXPECT_NEAR(error.row, 0.5, 1e-15);  // its rms row norm is 1
  EXPECT_EQ(compare(spec, Side::queries, 1, want, want).norm, 0);
}

TEST(Compare, KeepsPackedSequencesApart) {
  Spec spec = self_attention(3, 1);
  spec.cu_q = {0, 1, 3};
  const Error error = compare(spec, Side::queries, 1, {1.1, 100, 100}, {1, 100, 100});
  EXPECT_NEAR(error.norm, 0.1, 1e-12);
}

TEST(Compare, NanAndInfinityAreErrorsUnlessWanted) {
  Spec spec = self_attention(2, 1);
  EXPECT_EQ(compare(spec, Side::queries, 1, {1, kNan}, {1, 1}).norm, kInf);
  EXPECT_EQ(compare(spec, Side::queries, 1, {1, 1}, {1, kNan}).norm, kInf);
  EXPECT_EQ(compare(spec, Side::queries, 1, {1, kInf}, {1, 1}).row, kInf);
  EXPECT_EQ(compare(spec, Side::queries, 1, {1, kNan}, {1, kNan}).norm, 0);
  EXPECT_EQ(compare(spec, Side::queries, 1, {0, 1e-9}, {0, 0}).norm, kInf);
  EXPECT_EQ(compare(spec, Side::queries, 1, {1}, {1, 1}).norm, kInf);
  EXPECT_EQ(relative_error({kNan}, {1}), kInf);
  EXPECT_FALSE(identical({0.0}, {-0.0}));
  EXPECT_TRUE(identical({kNan, 1}, {kNan, 1}));
}

TEST(Golden, HasItsTenCases) {
  const std::vector<GoldenCase> cases = golden_cases();
  EXPECT_EQ(cases.size(), 10u);
  for (const GoldenCase& c : cases) {
    EXPECT_EQ(c.o.size(), c.inputs.grad_o.size()) << c.name;
    EXPECT_EQ(c.gradients.dq.size(), c.inputs.q.size()) << c.name;
    EXPECT_EQ(c.gradients.dridge.size(), c.inputs.ridge.size()) << c.name;
    EXPECT_EQ(c.gradients.dx.size(), c.inputs.x.size()) << c.name;
  }
}

}  // namespace
}  // namespace lla::test
