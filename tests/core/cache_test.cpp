// Attention over key-value caches: every implementation that follows lengths and pages gives what each sequence gives
// alone, whatever lies elsewhere in the cache.
#include "support/cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "support/compare.hpp"
#include "support/gates.hpp"

namespace lla::test {
namespace {

class Cache : public testing::TestWithParam<std::string> {
 protected:
  // The implementation's outputs against each sequence alone in fp64.
  void expect_right(CacheSpec spec, data::Kind kind = data::Kind::randn, uint64_t seed = 1) {
    if (!takes_cache(GetParam(), spec)) GTEST_SKIP() << lla_last_error();
    // Above 128 channels a GPU has no direct solver on the chip to turn to where float cannot give a tight tolerance.
    if (spec.dim <= 128 || memory_of(GetParam()).cuda_device() < 0) {
      spec.options.tolerance = tight_tolerance(spec.dtype);
    }
    const std::vector<Inputs> inputs = make_cache_inputs(spec, kind, 0.5, seed);
    const CacheForward got = run_cache(spec, inputs, GetParam()), want = cache_oracle(spec, inputs);
    ASSERT_EQ(got.status, LLA_OK) << got.message << ": " << spec.text();
    for (size_t b = 0; b < spec.sequences.size(); ++b) {
      EXPECT_LE(relative_error(got.o[b], want.o[b]), limit(spec)) << "sequence " << b << " of " << spec.text();
      for (const int status : got.row_status[b])
        EXPECT_EQ(status, LLA_ROW_OK) << "sequence " << b << " of " << spec.text();
    }
  }

  static double limit(const CacheSpec& spec) {
    switch (spec.output()) {
      case DType::f64: return 1e-9;
      case DType::f32: return spec.dtype == DType::f32 ? 1e-4 : 2.5e-3;
      default: return 4e-3;
    }
  }
};

std::vector<CachedSequence> decoding() { return {{1, 37}, {1, 1}, {1, 100}, {1, 64}}; }

TEST_P(Cache, DecodingWithUnequalLengths) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const int64_t page_size : {0, 1, 16, 7, 128}) {
      CacheSpec spec;
      spec.dtype = dtype;
      if (dtype == DType::bf16 || dtype == DType::f16) spec.out_dtype = DType::f32;
      spec.page_size = page_size;
      spec.sequences = decoding();
      expect_right(spec);
      if (HasFatalFailure() || IsSkipped()) return;
    }
  }
}

TEST_P(Cache, PagesInAnyOrderAndShared) {
  for (const PageOrder order : {PageOrder::reversed, PageOrder::shuffled, PageOrder::shared}) {
    CacheSpec spec;
    spec.page_size = 8;
    spec.order = order;
    spec.sequences = {{1, 100}, {1, 100}, {1, 37}, {1, 64}};
    expect_right(spec);
    if (HasFatalFailure() || IsSkipped()) return;
  }
}

TEST_P(Cache, DecodersBesidePromptsAndChunks) {
  for (const int64_t page_size : {0, 16}) {
    CacheSpec spec;
    spec.packed = true;
    spec.page_size = page_size;
    // A decoder, a fresh prompt, padding of two kinds, a chunk of a longer prompt, several tokens at once.
    spec.sequences = {{1, 90}, {40, 40}, {0, 0}, {0, 33}, {32, 120}, {4, 50}, {1, 1}};
    expect_right(spec);
    if (HasFatalFailure() || IsSkipped()) return;
  }
}

TEST_P(Cache, SeveralQueriesAndHeads) {
  for (const int64_t rows : {2, 5, 17, 70}) {
    CacheSpec spec;
    spec.heads_q = 8;
    spec.heads_kv = 2;
    spec.page_size = 16;
    spec.sequences = {{rows, 80}, {rows, rows}, {rows, 71}};
    expect_right(spec);
    if (HasFatalFailure() || IsSkipped()) return;
  }
}

TEST_P(Cache, StridesOfEngines) {
  for (const Layout layout : {Layout::head_major, Layout::padded, Layout::scattered}) {
    for (const int64_t page_size : {0, 16}) {
      CacheSpec spec;
      spec.layout = layout;
      spec.page_size = page_size;
      spec.heads_kv = 2;
      spec.sequences = decoding();
      expect_right(spec);
      if (HasFatalFailure() || IsSkipped()) return;
    }
  }
}

TEST_P(Cache, HeadDimensions) {
  for (const auto& [dim, value_dim] : {std::pair<int64_t, int64_t>{64, 64}, {128, 128}, {40, 72}, {3, 5}, {200, 130}}) {
    CacheSpec spec;
    spec.dim = dim;
    spec.value_dim = value_dim;
    spec.page_size = 16;
    spec.sequences = {{1, 300}, {1, 20}, {3, 130}};
    spec.packed = true;
    expect_right(spec);
    if (HasFatalFailure() || IsSkipped()) return;
  }
}

TEST_P(Cache, LeftPadding) {
  for (const int64_t page_size : {0, 8}) {
    CacheSpec spec;
    spec.page_size = page_size;
    // Rows of padding see nothing; a sequence may be all padding.
    spec.sequences = {{4, 40, 11}, {4, 40, 0}, {4, 40, 38}, {4, 40, 40}};
    expect_right(spec);
    if (HasFatalFailure() || IsSkipped()) return;
  }
}

TEST_P(Cache, WindowsAndFullMasks) {
  for (const int64_t left : {-1, 0, 9, 33}) {
    for (const bool causal : {true, false}) {
      CacheSpec spec;
      spec.packed = true;
      spec.page_size = 4;
      spec.sequences = {{1, 60}, {7, 61}, {20, 20}, {3, 50, 5}};
      spec.options.window_left = left;
      spec.options.causal = causal;
      expect_right(spec);
      if (HasFatalFailure() || IsSkipped()) return;
    }
  }
}

TEST_P(Cache, RidgesAndGivenX) {
  for (const RidgeShape ridge : {RidgeShape::none, RidgeShape::scalar, RidgeShape::head, RidgeShape::dimension}) {
    for (const bool packed : {false, true}) {
      CacheSpec spec;
      spec.ridge = ridge;
      spec.packed = packed;
      spec.page_size = 16;
      spec.sequences = decoding();
      expect_right(spec);
      if (HasFatalFailure() || IsSkipped()) return;
    }
  }
}

TEST_P(Cache, LongCaches) {
  for (const int64_t keys : {1000, 4096}) {
    CacheSpec spec;
    spec.dim = spec.value_dim = 64;
    spec.page_size = 32;
    spec.packed = true;
    spec.sequences = {{1, keys}, {1, keys / 3}, {2, keys - 1}};
    for (const data::Kind kind : {data::Kind::randn, data::Kind::cluster}) {
      expect_right(spec, kind);
      if (HasFatalFailure() || IsSkipped()) return;
    }
  }
}

// Drawn calls: one seed gives one call, and a failure prints it.
TEST_P(Cache, RandomCalls) {
  const int count = reduced() ? 15 : 60;
  for (int seed = 0; seed < count; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto between = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
    };
    CacheSpec spec;
    spec.dtype = std::array{DType::f32, DType::f64, DType::bf16, DType::f16}[random() % 4];
    if (spec.dtype == DType::bf16 || spec.dtype == DType::f16) spec.out_dtype = DType::f32;
    spec.heads_kv = between(1, 3);
    spec.heads_q = spec.heads_kv * between(1, 4);
    spec.dim = 8 * between(1, 16);
    spec.value_dim = random() % 2 ? spec.dim : 8 * between(1, 16);
    spec.page_size = random() % 3 ? between(1, 40) : 0;
    spec.order = std::array{PageOrder::forward, PageOrder::reversed, PageOrder::shuffled}[random() % 3];
    spec.layout = std::array{Layout::dense, Layout::head_major, Layout::padded, Layout::scattered}[random() % 4];
    spec.ridge = std::array{RidgeShape::none, RidgeShape::scalar, RidgeShape::head, RidgeShape::token,
                            RidgeShape::dimension}[random() % 5];
    spec.packed = random() % 2;
    spec.options.causal = random() % 4 != 0;
    if (random() % 3 == 0) spec.options.window_left = between(0, 60);
    const int64_t rows = between(1, 20);
    spec.sequences.clear();
    for (int64_t b = between(1, 5); b > 0; --b) {
      CachedSequence s;
      s.rows = spec.packed ? (random() % 3 ? 1 : between(0, 90)) : rows;
      s.keys = std::max(s.rows, between(0, 300));
      s.first_key = random() % 4 ? 0 : between(0, s.keys);
      spec.sequences.push_back(s);
    }
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    if (!takes_cache(GetParam(), spec)) continue;
    expect_right(spec, data::Kind::randn, static_cast<uint64_t>(seed));
    if (HasFatalFailure() || IsSkipped()) return;
  }
}

// One row of a sequence filled token by token is the row of one call over all of it.
TEST_P(Cache, FilledTokenByTokenEqualsOneCall) {
  CacheSpec whole;
  whole.sequences = {{40, 40}};
  if (!takes_cache(GetParam(), whole)) GTEST_SKIP() << lla_last_error();
  whole.options.tolerance = tight_tolerance(whole.dtype);
  const std::vector<Inputs> inputs = make_cache_inputs(whole, data::Kind::randn, 0.5, 3);
  const CacheForward want = run_cache(whole, inputs, GetParam());
  ASSERT_EQ(want.status, LLA_OK) << want.message;
  for (int64_t i = 0; i < 40; ++i) {
    CacheSpec step = whole;
    step.sequences = {{1, i + 1}};
    step.capacity = 45;
    Inputs one = inputs[0];
    const auto row = [&](std::vector<double>& t, int64_t width) {
      t = std::vector<double>(t.begin() + i * width, t.begin() + (i + 1) * width);
    };
    row(one.q, whole.heads_q * whole.dim);
    row(one.ridge, whole.heads_q);
    const CacheForward got = run_cache(step, {one}, GetParam());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    const auto first = want.o[0].begin() + i * whole.heads_q * whole.value_dim;
    EXPECT_LE(relative_error(got.o[0], {first, first + whole.heads_q * whole.value_dim}), 1e-4) << "token " << i;
  }
}

// With batch_invariant a sequence's bits are its own.
TEST_P(Cache, BatchInvariance) {
  CacheSpec together;
  together.options.batch_invariant = 1;
  together.packed = true;
  together.page_size = 16;
  together.sequences = {{1, 90}, {40, 40}, {1, 500}, {30, 200}, {1, 90}};
  if (!takes_cache(GetParam(), together)) GTEST_SKIP() << lla_last_error();
  const std::vector<Inputs> inputs = make_cache_inputs(together, data::Kind::randn, 0.5, 5);
  const CacheForward all = run_cache(together, inputs, GetParam());
  ASSERT_EQ(all.status, LLA_OK) << all.message;
  for (size_t b = 0; b < together.sequences.size(); ++b) {
    CacheSpec alone = together;
    alone.sequences = {together.sequences[b]};
    alone.capacity = 505;
    const CacheForward one = run_cache(alone, {inputs[b]}, GetParam(), [](lla_forward_args& a) {
      a.max_seqlen_q = std::min<int64_t>(40, a.q.size[0]);
      a.max_seqlen_k = 500;
    });
    ASSERT_EQ(one.status, LLA_OK) << one.message;
    EXPECT_TRUE(identical(one.o[0], all.o[b])) << "sequence " << b;
  }
}

INSTANTIATE_TEST_SUITE_P(Implementations, Cache, testing::ValuesIn(implementations_under_test()), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// ---- what the host refuses -----------------------------------------------------------------------------------------

void expect_refused(const CacheSpec& spec, CacheEdit edit, const std::vector<std::string>& words) {
  const CacheForward got = run_cache(spec, make_cache_inputs(spec, data::Kind::randn, 0.5, 1), "reference", edit);
  EXPECT_EQ(got.status, LLA_INVALID_ARGUMENT) << got.message;
  for (const std::string& word : words) EXPECT_NE(got.message.find(word), std::string::npos) << got.message;
}

int32_t* ints(const lla_tensor& t) { return static_cast<int32_t*>(t.data); }

CacheSpec paged() {
  CacheSpec spec;
  spec.page_size = 8;
  spec.sequences = {{1, 20}, {1, 30}};
  return spec;
}

TEST(CacheRefusals, LengthsPagesAndShapes) {
  CacheSpec packed = paged();
  packed.packed = true;
  CacheSpec contiguous = paged();
  contiguous.page_size = 0;
  using A = lla_forward_args&;
  expect_refused(paged(), [](A a) { ints(a.seqlens_k)[1] = -1; }, {"seqlens_k", "sequence 1", "-1"});
  expect_refused(paged(), [](A a) { ints(a.seqlens_k)[1] = 31; }, {"seqlens_k", "sequence 1", "31", "30"});
  expect_refused(paged(), [](A a) { a.max_seqlen_k = 25; }, {"seqlens_k", "30", "25"});
  expect_refused(paged(), [](A a) { a.max_seqlen_k = -25; }, {"max_seqlen_k", "-25"});
  expect_refused(paged(), [](A a) { a.max_total_k = -1; }, {"max_total_k", "-1"});
  expect_refused(paged(), [](A a) { ints(a.page_table)[2] = -1; }, {"page_table", "sequence 0", "page -1", "entry 2"});
  expect_refused(paged(), [](A a) { ints(a.page_table)[1] = 1000; }, {"page_table", "1000"});
  expect_refused(paged(), [](A a) { a.page_table.dtype = LLA_I64; }, {"page_table", "i64", "i32"});
  expect_refused(paged(), [](A a) { a.page_table.size[0] = 1; }, {"page_table", "(1, "});
  expect_refused(paged(), [](A a) { a.page_table.stride[1] = 2; }, {"page_table", "dense"});
  expect_refused(paged(), [](A a) { a.page_table = {}; }, {"k", "contiguous", "page_table"});
  expect_refused(paged(), [](A a) { a.seqlens_k = {}, a.max_seqlen_k = 0; }, {"k: shape is ", "(2, "});
  expect_refused(contiguous, [](A a) { a.seqlens_k = {}, a.max_seqlen_k = 0, a.first_key = a.row_status; },
                 {"first_key", "seqlens_k"});
  expect_refused(paged(), [](A a) { a.seqlens_k.size[0] = 1; }, {"seqlens_k", "1", "2"});
  expect_refused(paged(), [](A a) { a.seqlens_k.dtype = LLA_F32; }, {"seqlens_k", "i32"});
  expect_refused(paged(), [](A a) { a.v.size[1] = 4; }, {"v", "page_size"});
  expect_refused(paged(), [](A a) { a.cu_seqlens_k = a.seqlens_k; }, {"3 dimensions", "cu_seqlens"});
  expect_refused(packed, [](A a) { a.cu_seqlens_k = a.cu_seqlens_q; }, {"cu_seqlens_k", "cache"});
  expect_refused(paged(), [](A a) { a.max_seqlen_q = 1; }, {"max_seqlen_q", "cu_seqlens_q"});
  expect_refused(packed, [](A a) { ints(a.cu_seqlens_q)[1] = -1; }, {"cu_seqlens_q", "decrease"});
  expect_refused(packed, [](A a) { a.cu_seqlens_q.size[0] = 2; }, {"cu_seqlens_q", "2", "one more"});
  expect_refused(paged(), [](A a) { a.o.data = a.page_table.data; }, {"o", "overlaps", "page_table"});
}

TEST(CacheRefusals, NoBackwardPass) {
  expect_refused(paged(),
                 [](lla_forward_args& a) {
                   static float saved[4];
                   a.saved = dense(saved, DType::f32, {4});
                 },
                 {});
  CacheSpec spec = paged();
  const CacheForward fine = run_cache(spec, make_cache_inputs(spec, data::Kind::randn, 0.5, 1), "reference");
  EXPECT_EQ(fine.status, LLA_OK) << fine.message;
}

// Table entries that no row can see hold whatever they held: behind the length, before the window, in padding.
TEST(CacheRefusals, EntriesNobodySeesAreNotLookedAt) {
  CacheSpec spec = paged();
  spec.options.window_left = 5;
  spec.sequences = {{1, 30}, {1, 30}};
  const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.5, 1);
  const CacheForward want = run_cache(spec, inputs, "reference");
  const CacheForward got = run_cache(spec, inputs, "reference", [](lla_forward_args& a) {
    ints(a.page_table)[0] = -5;    // keys 0 to 7; the row sees 24 to 29
    ints(a.page_table)[2] = 9999;  // keys 16 to 23
    ints(a.page_table)[4] = 77;    // behind the length
  });
  EXPECT_EQ(got.status, LLA_OK) << got.message;
  EXPECT_TRUE(identical(got.o[0], want.o[0]));
}

}  // namespace
}  // namespace lla::test
