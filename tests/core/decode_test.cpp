// Generation: few rows over long caches, in the accuracy the issue of it asks for, and what must not change a bit of
// it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/text.hpp"
#include "support/cache.hpp"
#include "support/compare.hpp"
#include "support/gates.hpp"
#include "support/real_cases.hpp"

namespace lla::test {
namespace {

// Outputs in f32 over what the cache's type holds, at the default tolerance.
double output_gate(DType dtype) { return dtype == DType::f64 ? 1e-7 : dtype == DType::f32 ? 3e-4 : 2.5e-3; }

CacheSpec one_sequence(DType dtype, int64_t dim, int64_t keys, int64_t rows = 1) {
  CacheSpec spec;
  spec.dtype = dtype;
  if (dtype != DType::f64) spec.out_dtype = DType::f32;
  spec.dim = spec.value_dim = dim;
  spec.heads_q = spec.heads_kv = 1;
  spec.ridge = RidgeShape::scalar;
  spec.page_size = 16;
  spec.order = PageOrder::shuffled;
  spec.sequences = {{rows, keys}};
  return spec;
}

class Decode : public testing::TestWithParam<std::string> {
 protected:
  bool takes(const CacheSpec& spec) { return takes_cache(GetParam(), spec); }

  // Error of the only sequence; rows that say so may be anything.
  void expect_close(const CacheSpec& spec, const std::vector<Inputs>& inputs, double gate, const std::string& what) {
    const CacheForward got = run_cache(spec, inputs, GetParam()), want = cache_oracle(spec, inputs);
    ASSERT_EQ(got.status, LLA_OK) << got.message << ": " << spec.text();
    EXPECT_LE(relative_error(got.o[0], want.o[0]), gate) << what << ", " << spec.text();
    for (const int status : got.row_status[0]) EXPECT_EQ(status, LLA_ROW_OK) << what << ", " << spec.text();
  }
};

TEST_P(Decode, AccuracyByKind) {
  if (!takes(one_sequence(DType::f32, 64, 300))) GTEST_SKIP() << lla_last_error();
  std::vector<int64_t> lengths = {300, 5000};
  if (!reduced()) lengths.push_back(65536);
  std::vector<data::Kind> kinds(std::begin(data::kinds), std::end(data::kinds));
  for (const data::Kind kind : {data::Kind::queries6, data::Kind::mean30, data::Kind::sink, data::Kind::two_tokens}) {
    kinds.push_back(kind);
  }
  for (const int64_t dim : {int64_t{64}, int64_t{128}}) {
    for (const int64_t keys : lengths) {
      for (const data::Kind kind : kinds) {
        for (const double ridge : {1.0, 0.01}) {
          // The oracle takes a second for each of the longest: those that accumulate worst.
          const bool hard = kind == data::Kind::cluster || kind == data::Kind::aniso;
          if (keys > 5000 && (ridge == 1.0 || !hard)) continue;
          const DType dtype = keys % 2 == 0 ? DType::bf16 : DType::f32;
          const CacheSpec spec = one_sequence(dtype, dim, keys);
          expect_close(spec, make_cache_inputs(spec, kind, ridge, 11), output_gate(dtype),
                       core::cat(data::name(kind), ", ridge ", ridge));
        }
      }
    }
  }
}

// Sums are relative to a maximum that may rise anywhere in a row, long after the first of them have been put away.
TEST_P(Decode, LogitsThatRise) {
  if (!takes(one_sequence(DType::f32, 64, 300))) GTEST_SKIP() << lla_last_error();
  for (const int64_t from : {100, 900, 1100, 2300, 3400}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int64_t rows : {1, 5}) {
        CacheSpec spec = one_sequence(dtype, 64, 4000, rows);
        if (reduced() && (rows > 1 || dtype == DType::bf16)) continue;
        std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 7);
        lengthen_keys(spec, inputs, from);
        expect_close(spec, inputs, output_gate(dtype), core::cat("from ", from));
        spec.ridge = RidgeShape::none;
        inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 7);
        lengthen_keys(spec, inputs, from);
        expect_close(spec, inputs, output_gate(dtype), core::cat("x given, from ", from));
      }
    }
  }
}

// Other types, groups and several tokens at once; one row of a unit must not disturb the next.
TEST_P(Decode, TypesGroupsAndRows) {
  if (!takes(one_sequence(DType::f32, 64, 300))) GTEST_SKIP() << lla_last_error();
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const int64_t group : {1, 3, 8}) {
      for (const int64_t rows : {1, 2, 5}) {
        if (reduced() && (group == 3 || rows == 2)) continue;
        CacheSpec spec = one_sequence(dtype, 64, reduced() ? 300 : 1500, rows);
        spec.heads_kv = 2;
        spec.heads_q = 2 * group;
        spec.ridge = RidgeShape::token;
        expect_close(spec, make_cache_inputs(spec, data::Kind::aniso, 0.05, 3), output_gate(dtype), "aniso");
        spec.ridge = RidgeShape::none;
        expect_close(spec, make_cache_inputs(spec, data::Kind::aniso, 0.05, 3), output_gate(dtype), "x given");
      }
    }
  }
}

// Heads of a language model in training: the last rows of each, decoded one at a time.
TEST_P(Decode, RealHeads) {
  for (const RealCase& real : real_cases()) {
    CacheSpec spec = one_sequence(DType::bf16, real.spec.dim, real.spec.length_k, 1);
    spec.ridge = RidgeShape::token;
    if (!takes(spec)) GTEST_SKIP() << lla_last_error();
    for (const int64_t keys : {real.spec.length_k, real.spec.length_k / 2, int64_t{70}}) {
      spec.sequences = {{1, keys}};
      expect_close(spec, {last_rows(real, 1, keys)}, 2.5e-3, real.name);
    }
  }
}

// Few keys: 1 to D + 1 and a little more, with a ridge of 1e-3 and without one. Whatever the caller's other solver says
// of such a row, this one says too, and where it says the row is fine it is.
TEST_P(Decode, FewKeys) {
  constexpr int64_t kDim = 24;
  if (!takes(one_sequence(DType::f32, kDim, 30))) GTEST_SKIP() << lla_last_error();
  for (const double ridge : {1e-3, 0.0}) {
    for (int64_t keys = 1; keys <= kDim + 3; ++keys) {
      CacheSpec spec = one_sequence(DType::f32, kDim, keys);
      const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, ridge, 5);
      const CacheForward got = run_cache(spec, inputs, GetParam()), want = cache_oracle(spec, inputs);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      EXPECT_TRUE(all_finite(got.o[0])) << spec.text();
      if (ridge > 0) {
        EXPECT_EQ(got.row_status[0][0], LLA_ROW_OK) << spec.text();
        EXPECT_LE(relative_error(got.o[0], want.o[0]), 1e-3) << "ridge " << ridge << ", " << spec.text();
      } else if (keys <= kDim) {  // the keys' differences do not span the space
        EXPECT_EQ(got.row_status[0][0], LLA_ROW_BREAKDOWN) << spec.text();
      }
      if (keys == 1) {
        EXPECT_TRUE(identical(got.o[0], inputs[0].v)) << "one key has the whole weight";
      }
    }
  }
}

// A row is NaN exactly if it sees a key or value that is not finite, whatever its weight, or has such a query; its
// neighbours keep their bits.
TEST_P(Decode, NotFinite) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
  for (const auto& [dim, longer] : {std::pair<int64_t, double>{20, 1}, {64, 1}, {64, 300}}) {
    for (const RidgeShape ridge : {RidgeShape::scalar, RidgeShape::none}) {
      CacheSpec spec = one_sequence(DType::f32, dim, 700, 3);
      spec.ridge = ridge;
      spec.heads_q = 2;
      if (!takes(spec)) GTEST_SKIP() << lla_last_error();
      std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 9);
      for (double& q : inputs[0].q) q *= longer;
      const CacheForward clean = run_cache(spec, inputs, GetParam());
      for (const double poison : {kNaN, kInf, -kInf}) {
        for (const bool in_key : {true, false}) {
          std::vector<Inputs> poisoned = inputs;
          // Key 698 of 700: rows 1 and 2 of three see it, row 0 does not.
          (in_key ? poisoned[0].k : poisoned[0].v)[static_cast<size_t>(698 * dim + 7)] = poison;
          const CacheForward got = run_cache(spec, poisoned, GetParam());
          ASSERT_EQ(got.status, LLA_OK) << got.message;
          for (size_t e = 0; e < got.o[0].size(); ++e) {
            const bool first = e < static_cast<size_t>(2 * dim);
            EXPECT_TRUE(first ? got.o[0][e] == clean.o[0][e] : std::isnan(got.o[0][e])) << "element " << e;
          }
          for (size_t r = 0; r < got.row_status[0].size(); ++r) {  // (heads, rows)
            EXPECT_EQ(got.row_status[0][r], r % 3 == 0 ? clean.row_status[0][r] : LLA_ROW_NAN) << "row " << r;
          }
        }
      }
    }
  }
}

// An output that its type cannot hold is infinite, and its row does not say OK.
TEST_P(Decode, OutputsBeyondTheirType) {
  for (const RidgeShape ridge : {RidgeShape::scalar, RidgeShape::none}) {
    CacheSpec spec = one_sequence(DType::f16, 64, 300);
    spec.out_dtype = DType::f16, spec.ridge = ridge;
    spec.sequences.assign(12, {1, 300});
    if (!takes(spec)) GTEST_SKIP() << lla_last_error();
    std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.01, 4);
    for (Inputs& own : inputs) {  // values follow the keys, so outputs follow the queries
      for (size_t i = 0; i < own.v.size(); ++i) own.v[i] = rounded(own.k[i] * 12000, spec.dtype);
      for (double& q : own.q) q = rounded(q * 2, spec.dtype);
      for (double& x : own.x) x = rounded(x * 4, spec.dtype);
    }
    const CacheForward got = run_cache(spec, inputs, GetParam()), want = cache_oracle(spec, inputs);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    size_t beyond = 0, held = 0;
    for (size_t b = 0; b < got.o.size(); ++b) {
      const bool infinite = std::any_of(got.o[b].begin(), got.o[b].end(), [](double o) { return std::isinf(o); });
      const bool large = std::any_of(want.o[b].begin(), want.o[b].end(), [](double o) { return std::abs(o) > 60000; });
      beyond += infinite, held += !large;
      EXPECT_LE(infinite, large) << "sequence " << b;
      if (infinite) {
        EXPECT_NE(got.row_status[b][0], LLA_ROW_OK) << "sequence " << b;
      }
      if (!large) {
        EXPECT_EQ(got.row_status[b][0], LLA_ROW_OK) << "sequence " << b;
      }
    }
    EXPECT_GT(beyond, 0u) << "the case tests nothing";
    if (ridge == RidgeShape::scalar) {
      EXPECT_GT(held, 0u);
    }
  }
}

// Solvers by name agree, and the solved row does not depend on how the cache is laid out.
TEST_P(Decode, SolversAndLayoutsAgree) {
  CacheSpec spec = one_sequence(DType::f32, 64, 2000, 2);
  if (!takes(spec)) GTEST_SKIP() << lla_last_error();
  spec.options.tolerance = 1e-5;
  const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::cluster, 0.1, 21);
  const CacheForward base = run_cache(spec, inputs, GetParam());
  ASSERT_EQ(base.status, LLA_OK) << base.message;
  for (const int64_t page : {0, 1, 64, 500}) {
    CacheSpec other = spec;
    other.page_size = page;
    EXPECT_TRUE(identical(run_cache(other, inputs, GetParam()).o[0], base.o[0])) << "pages of " << page;
  }
  for (const auto solver : {LLA_SOLVER_DIRECT, LLA_SOLVER_CG}) {
    CacheSpec other = spec;
    other.options.solver = static_cast<int32_t>(solver);
    const CacheForward got = run_cache(other, inputs, GetParam());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    EXPECT_LE(relative_error(got.o[0], base.o[0]), 3e-4) << "solver " << solver;
  }
}

// 2,000 tokens one at a time are one call over all of them.
TEST_P(Decode, FilledTokenByToken) {
  const int64_t tokens = reduced() ? 200 : 2000;
  CacheSpec whole = one_sequence(DType::bf16, 32, tokens, tokens);
  if (!takes(whole)) GTEST_SKIP() << lla_last_error();
  const std::vector<Inputs> inputs = make_cache_inputs(whole, data::Kind::randn, 0.1, 13);
  const CacheForward want = run_cache(whole, inputs, GetParam());
  ASSERT_EQ(want.status, LLA_OK) << want.message;
  for (int64_t i = 0; i < tokens; i = i < 100 ? i + 1 : i + 97) {
    CacheSpec step = whole;
    step.sequences = {{1, i + 1}};
    Inputs one = inputs[0];
    one.q = std::vector<double>(one.q.begin() + i * 32, one.q.begin() + (i + 1) * 32);
    one.k.resize(static_cast<size_t>((i + 1) * 32));
    one.v.resize(static_cast<size_t>((i + 1) * 32));
    const CacheForward got = run_cache(step, {one}, GetParam());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    const auto first = want.o[0].begin() + i * 32;
    EXPECT_LE(relative_error(got.o[0], {first, first + 32}), 4e-3) << "token " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Implementations, Decode, testing::ValuesIn(implementations_under_test()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lla::test
