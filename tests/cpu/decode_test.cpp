// Decoding on the CPU: the number of threads and the SIMD target's vectors.
#include <gtest/gtest.h>

#include "cpu/cpu.hpp"
#include "cpu/decode_run.hpp"
#include "each_target.hpp"
#include "support/cache.hpp"
#include "support/compare.hpp"
#include "support/gates.hpp"
#include "support/run.hpp"

namespace lla::test {
namespace {

CacheSpec mixed() {
  CacheSpec spec;
  spec.packed = true;
  spec.page_size = 8;
  spec.order = PageOrder::shuffled;
  spec.dim = spec.value_dim = 32;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  // Decoders, short and of several spans, beside a chunk that takes the blocks of the forward.
  spec.sequences = {{1, 5000}, {1, 40}, {3, 2100}, {40, 300}, {0, 7}, {8, 1025}, {1, 1}};
  return spec;
}

TEST(CpuDecode, BitsDoNotDependOnThreads) {
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
    CacheSpec spec = mixed();
    spec.ridge = ridge;
    const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::self, 0.05, 2);
    cpu::set_num_threads(1);
    const CacheForward one = run_cache(spec, inputs, "cpu");
    ASSERT_EQ(one.status, LLA_OK) << one.message;
    for (const int threads : {2, 5}) {
      cpu::set_num_threads(threads);
      const CacheForward more = run_cache(spec, inputs, "cpu");
      for (size_t b = 0; b < one.o.size(); ++b) {
        EXPECT_TRUE(identical(more.o[b], one.o[b])) << threads << " threads, sequence " << b;
        EXPECT_EQ(more.row_status[b], one.row_status[b]);
      }
    }
    cpu::set_num_threads(0);
  }
}

TEST(CpuDecode, EveryTarget) {
  CacheSpec spec = mixed();
  spec.dim = 37;  // no multiple of any vector
  spec.value_dim = 64;
  const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::mean, 0.1, 4);
  const CacheForward want = cache_oracle(spec, inputs);
  on_each_target([&](const char* target) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      CacheSpec in = spec;
      in.dtype = dtype;
      const CacheForward got = run_cache(in, inputs, "cpu");
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      for (size_t b = 0; b < got.o.size(); ++b) {
        EXPECT_LE(relative_error(got.o[b], want.o[b]), dtype == DType::f64 ? 1e-7 : 3e-4)
            << target << ", sequence " << b;
      }
    }
  });
}

// A sequence's bits are its own, with or without the option: other sequences, waves and bounds change nothing.
TEST(CpuDecode, BitsDoNotDependOnTheBatch) {
  const CacheSpec together = mixed();
  const std::vector<Inputs> inputs = make_cache_inputs(together, data::Kind::randn, 0.1, 6);
  const CacheForward all = run_cache(together, inputs, "cpu");
  ASSERT_EQ(all.status, LLA_OK) << all.message;
  for (size_t b = 0; b < together.sequences.size(); ++b) {
    CacheSpec alone = together;
    alone.sequences = {together.sequences[b]};
    if (alone.sequences[0].rows == 0) continue;
    const CacheForward one = run_cache(alone, {inputs[b]}, "cpu");
    ASSERT_EQ(one.status, LLA_OK) << one.message;
    EXPECT_TRUE(identical(one.o[0], all.o[b])) << "sequence " << b;
  }
}

// Workspace of decoding does not grow with the cache beyond a row's logits.
TEST(CpuDecode, WorkspaceOfLongCaches) {
  core::Problem p;
  p.cache = true;
  p.batch = 1;
  p.seqlen_q = p.total_q = 1;
  p.heads_q = p.heads_kv = 1;
  p.dim = p.value_dim = 128;
  const auto bytes = [&](int64_t keys) {
    p.seqlen_k = keys;
    return static_cast<int64_t>(cpu::decode_workspace(p, 2));
  };
  EXPECT_TRUE(cpu::only_decodes(p));
  EXPECT_LE(bytes(1 << 20) - bytes(1 << 16), ((1 << 20) - (1 << 16)) * 8 + 4096);  // of the pass in double
  EXPECT_LE(bytes(1 << 16), 8 << 20);
}

// Without a cache few rows over many keys decode too, unless something is saved for a backward pass.
TEST(CpuDecode, FewRowsOfADenseBatch) {
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
    for (const int64_t rows : {1, 3}) {
      Spec spec;
      spec.batch = 2;
      spec.length_q = rows;
      spec.length_k = 2500;
      spec.heads_q = 4;
      spec.heads_kv = 2;
      spec.dim = spec.value_dim = 32;
      spec.ridge = ridge;
      const Inputs inputs = make_inputs(spec, data::Kind::self, 0.05, 3);
      const Forward want = oracle_forward(spec, inputs);
      const Forward plain = run_forward(spec, inputs, "cpu", {.saved = false});
      const Forward saving = run_forward(spec, inputs, "cpu");
      ASSERT_EQ(plain.status, LLA_OK) << plain.message;
      ASSERT_EQ(saving.status, LLA_OK) << saving.message;
      EXPECT_LE(relative_error(plain.o, want.o), 3e-4) << spec.text();
      EXPECT_LE(relative_error(saving.o, want.o), 3e-4) << spec.text();
      for (const int iterations : plain.info.iterations) EXPECT_EQ(iterations, -1) << spec.text();
      if (ridge == RidgeShape::none) continue;
      for (const int iterations : saving.info.iterations) EXPECT_GT(iterations, 0) << spec.text();
    }
  }
}

}  // namespace
}  // namespace lla::test
