// The data kinds: golden values shared with the Python twin, and the statistics each kind promises.
#include "data/data.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>

#include "data/heads.hpp"
#include "support/golden.hpp"

namespace lla::data {
namespace {

TEST(Data, GoldenValues) {
  std::ifstream in(test::test_data_file("data.txt"));
  std::string line, word;
  ASSERT_TRUE(std::getline(in, line));
  std::istringstream head(line);
  uint64_t seed = 0;
  Sizes s{};
  head >> word >> seed >> word >> s.batch >> word >> s.length_q >> word >> s.length_k >> word >> s.heads_q >> word >>
      s.heads_kv >> word >> s.dim >> word >> s.value_dim;
  ASSERT_TRUE(head) << line;
  int checked = 0;
  Kind made = Kind::randn;
  Tensors tensors = make(made, seed, s);
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string kind, tensor;
    int64_t b, i, h, c;
    double value;
    ASSERT_TRUE(fields >> kind >> tensor >> b >> i >> h >> c >> value) << line;
    if (find_kind(kind).value() != made) tensors = make(made = *find_kind(kind), seed, s);
    const bool query = tensor == "q";
    const int64_t length = query ? s.length_q : s.length_k;
    const int64_t heads = query ? s.heads_q : s.heads_kv;
    const int64_t width = tensor == "v" ? s.value_dim : s.dim;
    const std::vector<double>& t = query ? tensors.q : tensor == "k" ? tensors.k : tensors.v;
    EXPECT_NEAR(t.at(static_cast<size_t>(((b * length + i) * heads + h) * width + c)), value,
                1e-12 * (1 + std::abs(value)))
        << line;
    ++checked;
  }
  EXPECT_EQ(checked,
            static_cast<int>(std::size(kinds) + std::size(peaked_kinds) + std::size(degenerate_kinds)) * 3 * 5);
}

TEST(Data, KindsHaveNames) {
  for (Kind kind : kinds) EXPECT_EQ(find_kind(name(kind)), kind);
  for (Kind kind : peaked_kinds) EXPECT_EQ(find_kind(name(kind)), kind);
  for (Kind kind : degenerate_kinds) EXPECT_EQ(find_kind(name(kind)), kind);
  EXPECT_EQ(find_kind("nonsense"), std::nullopt);
}

TEST(Data, NormalsHaveTheMomentsOfANormal) {
  const int n = 200000;
  double sum = 0, squares = 0, fourth = 0, neighbours = 0, streams = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const double x = normal(7, 3, i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    neighbours += x * normal(7, 3, i + 1);
    streams += x * normal(7, 4, i);
  }
  const double sigma = 1 / std::sqrt(n);
  EXPECT_NEAR(sum / n, 0, 5 * sigma);
  EXPECT_NEAR(squares / n, 1, 5 * sigma * std::sqrt(2));
  EXPECT_NEAR(fourth / n, 3, 5 * sigma * std::sqrt(96));
  EXPECT_NEAR(neighbours / n, 0, 5 * sigma);
  EXPECT_NEAR(streams / n, 0, 5 * sigma);
}

TEST(Data, UniformsStayInside) {
  for (uint64_t i = 0; i < 100000; ++i) {
    const double u = uniform(0, 0, i);
    ASSERT_TRUE(u > 0 && u < 1) << i;
  }
}

double rms(const std::vector<double>& values, size_t first, size_t step) {
  double squares = 0;
  size_t count = 0;
  for (size_t i = first; i < values.size(); i += step, ++count) squares += values[i] * values[i];
  return std::sqrt(squares / static_cast<double>(count));
}

TEST(Data, AnisotropicKeysFallOffByDimension) {
  const int64_t dim = 16;
  const Tensors t = make(Kind::aniso, 1, {1, 1, 8000, 1, 1, dim, dim});
  EXPECT_NEAR(rms(t.k, 0, 1), 1, 0.03);
  EXPECT_NEAR(rms(t.k, 0, dim) / rms(t.k, 3, dim), 2, 0.1);
  EXPECT_NEAR(rms(t.k, 0, dim) / rms(t.k, 15, dim), 4, 0.2);
}

TEST(Data, PiecewiseDataIsLinearInEachSegmentAndInItsCone) {
  const int64_t dim = 3, length = 512;  // four segments, two sign bits
  const Tensors t = make(Kind::pw, 1, {1, length, length, 1, 1, dim, 2});
  EXPECT_EQ(t.q, t.k);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t segment = i / 128;
    EXPECT_EQ(t.k[static_cast<size_t>(i * dim)] > 0, (segment & 1) == 1);
    EXPECT_EQ(t.k[static_cast<size_t>(i * dim + 1)] > 0, (segment & 2) == 2);
  }
  // Three rows of a segment fix the map; a fourth must follow it. Solve for the weights of the first three by Cramer's
  // rule.
  for (int64_t segment = 0; segment < 4; ++segment) {
    const double* k = t.k.data() + segment * 128 * dim;
    const double* v = t.v.data() + segment * 128 * 2;
    const auto det = [](const double* a, const double* b, const double* c) {
      return a[0] * (b[1] * c[2] - b[2] * c[1]) - a[1] * (b[0] * c[2] - b[2] * c[0]) +
             a[2] * (b[0] * c[1] - b[1] * c[0]);
    };
    const double d = det(k, k + 3, k + 6);
    const double w0 = det(k + 9, k + 3, k + 6) / d, w1 = det(k, k + 9, k + 6) / d, w2 = det(k, k + 3, k + 9) / d;
    for (int c = 0; c < 2; ++c) EXPECT_NEAR(w0 * v[c] + w1 * v[2 + c] + w2 * v[4 + c], v[6 + c], 1e-9);
  }
}

TEST(TrainedHeads, AreReadWholeAndLaidOutSideBySide) {
  const std::vector<TrainedHead> all = read_heads(test::test_data_file("cases.bin"));
  ASSERT_EQ(all.size(), 5u);
  const std::vector<TrainedHead> longest = longest_heads(all);
  ASSERT_EQ(longest.size(), 4u);
  for (const TrainedHead& head : longest) {
    EXPECT_EQ(head.length, 384) << head.name;
    EXPECT_EQ(head.dim, 64);
    EXPECT_EQ(head.q.size(), 384u * 64) << head.name;
    EXPECT_EQ(head.grad_o.size(), head.q.size());
    EXPECT_EQ(head.ridge.size(), 384u);
  }
  // Three rows of six heads: the fifth is the first again.
  const std::vector<double> k = interleaved(longest, &TrainedHead::k, 3, 6);
  ASSERT_EQ(k.size(), 3u * 6 * 64);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t h = 0; h < 6; ++h) EXPECT_EQ(k[(i * 6 + h) * 64 + 7], longest[h % 4].k[i * 64 + 7]);
  }
  EXPECT_EQ(interleaved(longest, &TrainedHead::ridge, 384, 4)[4 * 100 + 2], longest[2].ridge[100]);
}

TEST(TrainedHeads, SayWhatIsWrong) {
  std::vector<TrainedHead> heads = longest_heads(read_heads(test::test_data_file("cases.bin")));
  heads[1].dim = 32;
  EXPECT_THROW(longest_heads(heads), std::runtime_error);
  EXPECT_THROW(read_heads(test::test_data_file("data.txt")), std::runtime_error);
  EXPECT_THROW(read_heads(test::test_data_file("nothing")), std::runtime_error);
}

}  // namespace
}  // namespace lla::data
