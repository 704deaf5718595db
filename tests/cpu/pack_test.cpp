// Packing: both layouts, storage types and strides, and keys that are not finite.
#include "cpu/pack.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace lla::cpu {
namespace {

struct Packed {
  std::vector<float> k_natural, k_grouped, v_natural, key_squares;
  std::vector<uint8_t> bad;
  std::atomic<int64_t> bad_count{0};
  PackedHead<float> head{};
  core::Problem problem;

  Packed(int64_t keys, int64_t dim, int64_t value_dim)
      : k_natural(round_up(keys, kPackRows) * dim, NAN),
        k_grouped(k_natural),
        v_natural(round_up(keys, kPackRows) * value_dim, NAN),
        key_squares(round_up(keys, kPackRows), NAN),
        bad(round_up(keys, kPackRows), 7) {
    problem.dim = dim;
    problem.value_dim = value_dim;
    problem.seqlen_k = problem.seqlen_q = keys;
    problem.heads_q = problem.heads_kv = 1;
    head.sequence = {0, 0, 0, keys, keys};
    head.seen = {0, keys};
    head.k = {k_natural.data(), k_grouped.data()};
    head.v = {v_natural.data(), nullptr};
    head.bad = bad.data();
    head.bad_count = &bad_count;
    head.key_squares = key_squares.data();
  }
};

core::Operand operand(const std::vector<float>& data, int64_t row, int64_t channel) {
  core::Operand t;
  t.data = const_cast<float*>(data.data());
  t.dtype = DType::f32;
  t.stride[1] = row;
  t.stride[3] = channel;
  return t;
}

TEST(Pack, WritesBothLayoutsFromAnyStrides) {
  constexpr int64_t keys = 31, dim = 5, value_dim = 3;
  std::vector<float> k(keys * dim), v(keys * value_dim);
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i) + 0.5f;
  for (size_t i = 0; i < v.size(); ++i) v[i] = -static_cast<float>(i);
  Packed packed(keys, dim, value_dim);
  // Keys channel-major, values row-major.
  pack_tile(packed.problem, operand(k, 1, keys), operand(v, value_dim, 1), packed.head, 0);
  for (int64_t r = 0; r < round_up(keys, kPackRows); ++r) {
    for (int64_t c = 0; c < dim; ++c) {
      const float want = r < keys ? k[c * keys + r] : 0.0f;
      EXPECT_EQ(packed.k_natural[r * dim + c], want);
      EXPECT_EQ(packed.k_grouped[(r / kPackRows * dim + c) * kPackRows + r % kPackRows], want);
    }
    for (int64_t c = 0; c < value_dim; ++c)
      EXPECT_EQ(packed.v_natural[r * value_dim + c], r < keys ? v[r * value_dim + c] : 0.0f);
  }
  EXPECT_FALSE(packed.head.any_bad(0, keys));
}

TEST(Pack, ZeroesAndMarksWhatIsNotFinite) {
  constexpr int64_t keys = 20, dim = 4;
  std::vector<float> k(keys * dim, 1), v(keys * dim, 2);
  k[3 * dim + 1] = std::numeric_limits<float>::quiet_NaN();
  k[7 * dim] = 1e20f;  // its square would overflow
  v[12 * dim + 3] = std::numeric_limits<float>::infinity();
  Packed packed(keys, dim, dim);
  pack_tile(packed.problem, operand(k, dim, 1), operand(v, dim, 1), packed.head, 0);
  for (int64_t j = 0; j < keys; ++j) {
    const bool bad = j == 3 || j == 7 || j == 12;
    EXPECT_EQ(packed.bad[j] != 0, bad) << j;
    EXPECT_EQ(packed.k_natural[j * dim + 1], bad ? 0.0f : 1.0f);
    EXPECT_EQ(packed.v_natural[j * dim + 3], bad ? 0.0f : 2.0f);
    EXPECT_EQ(packed.key_squares[j], bad ? 0.0f : 4.0f);
  }
  EXPECT_TRUE(packed.head.any_bad(0, 4));
  EXPECT_FALSE(packed.head.any_bad(4, 7));
  EXPECT_TRUE(packed.head.any_bad(12, 20));
}

TEST(Rows, RoundToNearestEvenOnTheWayOut) {
  std::vector<core::bf16> out(4);
  core::Operand t;
  t.data = out.data();
  t.dtype = DType::bf16;
  t.stride[3] = 1;
  const float values[] = {1.0f, 1.00390625f, 1.01171875f,
                          std::numeric_limits<float>::quiet_NaN()};  // exact, two ties, NaN
  write_row(t, 0, 4, values);
  EXPECT_EQ(core::to_float(out[0]), 1.0f);
  EXPECT_EQ(core::to_float(out[1]), 1.0f);
  EXPECT_EQ(core::to_float(out[2]), 1.015625f);
  EXPECT_TRUE(std::isnan(core::to_float(out[3])));
}

}  // namespace
}  // namespace lla::cpu
