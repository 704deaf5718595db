// Chunks of prompts and fresh prompts over caches, alone and beside decoders: right against fp64, a sequence's bits its
// own, what breaks a bound harming nobody else, and a captured graph that follows the lengths.
#include <cuda_runtime_api.h>

#include <cmath>
#include <numeric>

#include "gpu/cache_cases.hpp"
#include "gpu/gpu_test.hpp"

namespace lla::test {
namespace {

CacheSpec mixed(int64_t dim, std::vector<CachedSequence> sequences, int64_t page_size = 16) {
  CacheSpec spec = bf16_cache(dim, std::move(sequences), page_size);
  spec.packed = true;
  spec.order = PageOrder::shuffled;
  return spec;
}

class GpuCacheForward : public OnGpu {
 protected:
  void expect_right(const CacheSpec& spec, data::Kind kind = data::Kind::randn, double ridge = 0.1) {
    if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    const std::vector<Inputs> inputs = make_cache_inputs(spec, kind, ridge, 20261116);
    const CacheForward got = run_cache(spec, inputs, implementation());
    ASSERT_EQ(got.status, LLA_OK) << got.message << ": " << spec.text();
    for (size_t b = 0; b < spec.sequences.size(); ++b) {
      if (spec.sequences[b].rows == 0) continue;
      const Forward want = gpu_oracle_forward(spec.sequence(b), inputs[b]);
      ASSERT_EQ(want.status, LLA_OK) << want.message;
      // The first always decode, the last never; in between the call's shape decides.
      const int64_t rows = spec.sequences[b].rows * spec.heads_q / spec.heads_kv;
      const bool few = rows <= 16, many = rows > 128;
      EXPECT_LE(relative_error(got.o[b], want.o), few ? 2.5e-3 : accuracy_gates(DType::bf16, ridge).output)
          << "sequence " << b << " of " << spec.text() << ", " << data::name(kind) << ", ridge " << ridge;
      for (size_t i = 0; few && i < got.row_status[b].size(); ++i)
        EXPECT_EQ(got.row_status[b][i], LLA_ROW_OK) << "sequence " << b;
      if (!many) continue;
      // What such rows say without a cache they say with one, and with all keys in the window their bits are the same.
      const Forward dense = run_forward(spec.sequence(b), inputs[b], implementation(), {.saved = false});
      EXPECT_EQ(got.row_status[b], dense.info.status) << "sequence " << b;
      if (spec.options.window_left < 0) {
        EXPECT_TRUE(identical(got.o[b], dense.o)) << "sequence " << b << " of " << spec.text();
      }
    }
  }

  // After `edit`, sequence `bad` is invalid and the others keep the bits they have without it.
  void expect_invalid(const CacheSpec& spec, size_t bad, CacheEdit edit) {
    if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 5);
    const CacheForward want = run_cache(spec, inputs, implementation());
    const CacheForward got = run_cache(spec, inputs, implementation(), edit);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (size_t b = 0; b < spec.sequences.size(); ++b) {
      if (b != bad) {
        EXPECT_TRUE(identical(got.o[b], want.o[b])) << "sequence " << b << ", bad " << bad;
        EXPECT_EQ(got.row_status[b], want.row_status[b]);
        continue;
      }
      expect_invalid_rows(got, b);
    }
  }
};
LLA_EACH_CUDA_IMPLEMENTATION(GpuCacheForward);

const std::vector<CachedSequence> kBatch = {{1, 900},   {150, 1500}, {170, 170}, {0, 10},
                                            {133, 260}, {1, 37},     {40, 1000}};

TEST_P(GpuCacheForward, KindsRidgesAndPages) {
  for (const data::Kind kind : data::kinds) {
    for (const int64_t dim : {64, 128}) {
      for (const double ridge : {1.0, 0.01}) {
        expect_right(mixed(dim, kBatch, ridge == 1.0 ? 0 : 16), kind, ridge);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
  for (const int64_t page_size : {1, 7, 64, 512}) {
    for (const PageOrder order : {PageOrder::shuffled, PageOrder::shared}) {
      CacheSpec spec = mixed(128, {{140, 1000}, {1, 37}, {200, 1000}, {190, 190}, {60, 700}}, page_size);
      spec.order = order;
      expect_right(spec);
      spec.ridge = RidgeShape::none;
      expect_right(spec);
      if (HasFailure() || IsSkipped()) return;
    }
  }
}

TEST_P(GpuCacheForward, QueriesOfOneLength) {
  for (const int64_t rows : {9, 33, 64, 130}) {
    for (const RidgeShape ridge : {RidgeShape::scalar, RidgeShape::dimension, RidgeShape::none}) {
      for (const Layout layout : {Layout::dense, Layout::head_major, Layout::padded, Layout::scattered}) {
        CacheSpec spec = mixed(layout == Layout::padded ? 96 : 128, {{rows, 700}, {rows, 150}, {rows, 131}}, 0);
        spec.packed = false;
        spec.heads_q = 4;
        spec.layout = layout;
        spec.ridge = ridge;
        spec.value_dim = layout == Layout::head_major ? 72 : spec.dim;
        expect_right(spec);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
}

// f32 caches where TF32 is allowed: whole calls of the forward.
TEST_P(GpuCacheForward, F32WhereTf32IsAllowed) {
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
    CacheSpec spec = mixed(64, {{40, 700}, {40, 150}, {40, 41}});
    spec.packed = false;
    spec.dtype = DType::f32;
    spec.ridge = ridge;
    spec.options.precision = LLA_PRECISION_TF32;
    expect_right(spec);
  }
}

TEST_P(GpuCacheForward, WindowsPaddingGroupsAndTypes) {
  for (const int64_t left : {-1, 40, 300}) {
    for (const bool causal : {true, false}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        CacheSpec spec = mixed(64, {{4, 500}, {80, 900, 33}, {0, 10}, {60, 60}, {50, 700, 655}, {9, 9}});
        spec.dtype = dtype;
        spec.heads_q = 8;
        spec.options.window_left = left;
        spec.options.causal = causal;
        expect_right(spec);
        spec.ridge = RidgeShape::none;
        expect_right(spec);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
}

// What else is in the batch changes no bit: of decoders beside prompts, and of prompts beside whatever.
TEST_P(GpuCacheForward, NeighboursKeepTheirBits) {
  for (const int64_t dim : {64, 128}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      std::vector<CachedSequence> decoders;
      for (int64_t i = 0; i < 31; ++i) decoders.push_back({1, 300 + 77 * i});
      CacheSpec alone = mixed(dim, decoders);
      alone.ridge = ridge;
      CacheSpec together = alone;
      together.sequences.insert(together.sequences.begin() + 7, {{512, 1300}, {140, 140}});
      if (!takes_cache(implementation(), together)) GTEST_SKIP() << lla_last_error();
      std::vector<Inputs> inputs = make_cache_inputs(together, data::Kind::cluster, 0.1, 5);
      for (double& k : inputs[8].k) k *= 16;  // shared statistics would show
      const CacheForward all = run_cache(together, inputs, implementation());
      ASSERT_EQ(all.status, LLA_OK) << all.message;
      std::vector<Inputs> of_decoders = inputs;
      of_decoders.erase(of_decoders.begin() + 7, of_decoders.begin() + 9);
      const CacheForward few = run_cache(alone, of_decoders, implementation());
      ASSERT_EQ(few.status, LLA_OK) << few.message;
      for (size_t b = 0; b < decoders.size(); ++b)
        EXPECT_TRUE(identical(few.o[b], all.o[b < 7 ? b : b + 2])) << "decoder " << b << ", D " << dim;
      for (const size_t b : {7, 8}) {
        CacheSpec prompt = together;
        prompt.sequences = {together.sequences[b]};
        const CacheForward one = run_cache(prompt, {inputs[b]}, implementation());
        EXPECT_TRUE(identical(one.o[0], all.o[b])) << "prompt " << b << ", D " << dim;
      }
    }
  }
}

// The same where decode has so few rows that it puts them together in another way.
TEST_P(GpuCacheForward, FewDecodersKeepTheirBits) {
  for (const int64_t dim : {64, 128}) {
    for (const int64_t group : {1, 8}) {
      CacheSpec alone = mixed(dim, {{1, 5000}, {1, 300}, {1, 900}});
      alone.heads_q = 2 * group;
      CacheSpec together = alone;
      together.sequences.push_back({300, 1300});
      if (!takes_cache(implementation(), together)) GTEST_SKIP() << lla_last_error();
      std::vector<Inputs> inputs = make_cache_inputs(together, data::Kind::cluster, 0.1, 5);
      const CacheForward all = run_cache(together, inputs, implementation());
      inputs.pop_back();
      const CacheForward few = run_cache(alone, inputs, implementation());
      for (size_t b = 0; b < 3; ++b)
        EXPECT_TRUE(identical(few.o[b], all.o[b])) << "decoder " << b << ", D " << dim << ", group " << group;
    }
  }
}

TEST_P(GpuCacheForward, WhatBreaksABoundHarmsNobodyElse) {
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
    CacheSpec spec = mixed(64, {{150, 300}, {160, 700}, {1, 150}, {140, 160}, {1, 160}});
    spec.ridge = ridge;
    expect_invalid(spec, 1, [](lla_forward_args& a) { a.max_seqlen_k = 400; });
    // A page in use of the last prompt, before and behind those there are.
    expect_invalid(spec, 3, [](lla_forward_args& a) { write_int(a.page_table, 3 * a.page_table.size[1] + 4, -1); });
    expect_invalid(spec, 3, [](lla_forward_args& a) { write_int(a.page_table, 3 * a.page_table.size[1], 1 << 30); });
    expect_invalid(spec, 0, [](lla_forward_args& a) { write_int(a.seqlens_k, 0, -3); });
    expect_invalid(spec, 2, [](lla_forward_args& a) { write_int(a.seqlens_k, 2, 701); });
    if (HasFailure() || IsSkipped()) return;
  }
}

// Pages that some rows of a decoder see and others do not: the last, of keys 304 and 305, which the first two of four
// queries do not see, and with a window of 288 keys the first, whose last key is the first query's first.
TEST_P(GpuCacheForward, APageThatIsMissingIsTheWholeSequences) {
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
    CacheSpec spec = mixed(64, {{4, 100}, {4, 306}, {1, 150}}, 16);
    spec.ridge = ridge;
    expect_invalid(spec, 1, [](lla_forward_args& a) { write_int(a.page_table, a.page_table.size[1] + 19, -1); });
    spec.options.window_left = 287;
    expect_invalid(spec, 1, [](lla_forward_args& a) { write_int(a.page_table, a.page_table.size[1], 1 << 30); });
    if (HasFailure() || IsSkipped()) return;
  }
}

// Keys of sequences with many rows: 300 + 700 + 160. Decoders do not count.
TEST_P(GpuCacheForward, BoundOfAllKeys) {
  CacheSpec spec = mixed(64, {{150, 300}, {1, 700}, {160, 700}, {140, 160}});
  if (implementation() != "sm90") GTEST_SKIP() << "copies no keys";
  spec.max_total_k = 1160;
  expect_right(spec);
  expect_invalid(spec, 3, [](lla_forward_args& a) { a.max_total_k = 1159; });
}

// Where a decreasing cu_seqlens_q leaves rows to nobody else they are the broken sequence's.
TEST_P(GpuCacheForward, RowsThatDecrease) {
  const CacheSpec spec = mixed(64, {{150, 300}, {140, 200}, {160, 160}, {1, 50}});
  if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
  const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 5);
  const CacheForward want = run_cache(spec, inputs, implementation());
  const CacheForward got =
      run_cache(spec, inputs, implementation(), [](lla_forward_args& a) { write_int(a.cu_seqlens_q, 2, 145); });
  ASSERT_EQ(got.status, LLA_OK) << got.message;
  for (const size_t b : {0, 3}) EXPECT_TRUE(identical(got.o[b], want.o[b])) << "sequence " << b;
  for (const size_t b : {1, 2}) expect_invalid_rows(got, b);
}

// A graph captured while the lengths say something else: nothing of them is read before it runs.
lla_status capture_and_replay(const lla_forward_args* args) {
  lla_forward_args call = *args;
  std::vector<int32_t> lengths(static_cast<size_t>(call.seqlens_k.size[0])), zeros(lengths.size());
  const size_t bytes = lengths.size() * 4;
  EXPECT_EQ(cudaMemcpy(lengths.data(), call.seqlens_k.data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaMemset(call.seqlens_k.data, 0, bytes), cudaSuccess);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  EXPECT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  call.stream = stream;
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const lla_status status = lla_forward(&call);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  if (status != LLA_OK) return status;
  EXPECT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);  // all lengths zero
  EXPECT_EQ(cudaMemcpyAsync(call.seqlens_k.data, lengths.data(), bytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return status;
}

TEST_P(GpuCacheForward, GraphsFollowTheLengths) {
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
    CacheSpec spec = mixed(128, kBatch);
    spec.ridge = ridge;
    if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 9);
    const CacheForward want = run_cache(spec, inputs, implementation());
    const CacheForward got = run_cache(spec, inputs, implementation(), nullptr, capture_and_replay);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (size_t b = 0; b < spec.sequences.size(); ++b) EXPECT_TRUE(identical(got.o[b], want.o[b])) << "sequence " << b;
  }
}

// options.batch_invariant without a cache: packed sequences, some with few keys.
TEST_P(GpuCacheForward, PackedSequencesAlone) {
  const std::vector<int32_t> lengths = {100, 1, 700, 128, 40, 300};
  for (const int64_t dim : {64, 128}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      Spec all = self_attention(std::accumulate(lengths.begin(), lengths.end(), 0), dim, 2);
      all.dtype = DType::bf16;
      all.out_dtype = DType::f32;
      all.ridge = ridge;
      all.options.batch_invariant = 1;
      all.cu_q = {0};
      for (const int32_t n : lengths) all.cu_q.push_back(all.cu_q.back() + n);
      all.cu_k = all.cu_q;
      if (!test::takes(implementation(), all, false)) GTEST_SKIP() << lla_last_error();
      Inputs inputs = make_inputs(all, data::Kind::randn, 0.1, 3);
      for (int64_t i = 0; i < 100 * 2 * dim; ++i) inputs.k[static_cast<size_t>(i)] *= 16;  // of the first sequence
      const Forward together = run_forward(all, inputs, implementation());
      ASSERT_EQ(together.status, LLA_OK) << together.message;
      EXPECT_LE(relative_error(together.o, gpu_oracle_forward(all, inputs).o), 3e-3);
      for (size_t b = 0; b < lengths.size(); ++b) {
        Spec one = all;
        one.length_q = one.length_k = lengths[b];
        one.cu_q = one.cu_k = {0, lengths[b]};
        const auto part = [&](const std::vector<double>& t, int64_t width) {
          if (t.empty()) return t;
          const auto from = t.begin() + all.cu_q[b] * width;
          return std::vector<double>(from, from + lengths[b] * width);
        };
        const int64_t row = 2 * dim;
        const Inputs alone{part(inputs.q, row),   part(inputs.k, row), part(inputs.v, row),
                           part(inputs.ridge, 2), part(inputs.x, row), part(inputs.grad_o, row)};
        const Forward got = run_forward(one, alone, implementation());
        EXPECT_TRUE(identical(got.o, part(together.o, row))) << "sequence " << b << ", D " << dim;
      }
    }
  }
}

}  // namespace
}  // namespace lla::test
