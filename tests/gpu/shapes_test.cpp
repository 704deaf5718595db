// Shapes and options against the fp64 reference on the CPU: odd lengths, packed batches with empty sequences, every
// head dimension's kernel, Parallax, cached and recomputed weights.
#include "gpu/gpu_test.hpp"

namespace lla::test {
namespace {

class GpuShapes : public OnGpu {
 protected:
  // Both passes; the gates are those of the accuracy grid at its middle ridge.
  void expect_accurate(const Spec& spec, data::Kind kind = data::Kind::randn, double ridge = 0.1) const {
    SCOPED_TRACE(spec.text());
    if (!takes(spec)) return;
    const Inputs inputs = make_inputs(spec, kind, ridge, 9);
    const Forward got = run_forward(spec, inputs, implementation());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    expect_output(spec, got.o, oracle_forward(spec, inputs).o, 2e-3);
    const Backward gradients = run_backward(spec, inputs, got.saved, implementation());
    ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
    expect_gradients(spec, gradients, oracle_backward(spec, inputs), 2e-2);
  }
  static Spec bf16(int64_t length, int64_t dim) {
    Spec spec = self_attention(length, dim);
    spec.dtype = DType::bf16;
    spec.out_dtype = DType::f32;
    spec.ridge = RidgeShape::token;
    return spec;
  }
};
LLA_EACH_CUDA_IMPLEMENTATION(GpuShapes);

TEST_P(GpuShapes, OddLengths) {
  for (const int64_t length : {1, 2, 63, 65, 127, 129, 1000}) {
    if (reduced() && length > 130) continue;
    for (const int64_t dim : {64, 128}) {
      if (length == 1000 && dim == 128) continue;  // the reference would take minutes
      expect_accurate(bf16(length, dim));
    }
  }
}

TEST_P(GpuShapes, UnequalLengths) {
  for (const auto& [lq, lk] : {std::pair{1, 129}, std::pair{65, 200}, std::pair{130, 64}, std::pair{64, 63}}) {
    Spec spec = bf16(lq, 64);
    spec.length_k = lk;
    expect_accurate(spec);
    spec.options.causal = 0;
    expect_accurate(spec);
  }
}

TEST_P(GpuShapes, Windows) {
  for (const auto& [left, right] :
       {std::pair{0, 0}, std::pair{17, 5}, std::pair{100, 0}, std::pair{-1, 40}, std::pair{70, -1}}) {
    Spec spec = bf16(200, 64);
    spec.options.causal = 0;
    spec.options.window_left = left;
    spec.options.window_right = right;
    expect_accurate(spec);
  }
}

TEST_P(GpuShapes, PackedBatchesWithEmptySequences) {
  Spec spec = bf16(260, 64);
  spec.heads_q = 2;
  spec.cu_q = {0, 0, 65, 66, 66, 260};
  spec.cu_k = {0, 3, 68, 68, 131, 260};  // keys without queries, queries without keys, unequal lengths
  expect_accurate(spec);
  spec.options.causal = 0;
  expect_accurate(spec);
}

TEST_P(GpuShapes, HeadDimensions) {
  for (const int64_t dim : {8, 32, 40, 80, 96, 112, 128, 136, 256}) {
    if (reduced() && dim > 128) continue;
    expect_accurate(bf16(150, dim));
  }
  Spec spec = bf16(150, 64);
  spec.value_dim = 128;
  expect_accurate(spec);
  spec.value_dim = 24;
  expect_accurate(spec);
}

TEST_P(GpuShapes, DataTypesAndLayouts) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const Layout layout : {Layout::dense, Layout::head_major, Layout::padded, Layout::scattered}) {
      Spec spec = bf16(100, 64);
      spec.dtype = dtype;
      spec.out_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
      spec.layout = layout;
      spec.heads_q = 4;
      spec.heads_kv = 2;
      expect_accurate(spec);
    }
  }
}

TEST_P(GpuShapes, RidgeShapes) {
  for (const RidgeShape ridge :
       {RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension, RidgeShape::none}) {
    Spec spec = bf16(140, 64);
    spec.batch = 2;
    spec.heads_q = 2;
    spec.ridge = ridge;
    spec.options.tolerance = 1e-4;  // a sum over rows is smaller than its terms
    expect_accurate(spec, data::Kind::randn, 0.5);
  }
}

TEST_P(GpuShapes, CachedAndRecomputedWeightsAgree) {
  Spec cached = bf16(700, 128), recomputed = cached;
  cached.options.weights = LLA_WEIGHTS_CACHED;
  recomputed.options.weights = LLA_WEIGHTS_RECOMPUTE;
  LLA_SKIP_UNLESS_TAKEN(cached);
  for (const data::Kind kind : {data::Kind::randn, data::Kind::self}) {
    const Inputs inputs = make_inputs(cached, kind, 0.01, 10);
    const Forward a = run_forward(cached, inputs, implementation());
    const Forward b = run_forward(recomputed, inputs, implementation());
    ASSERT_EQ(a.status, LLA_OK) << a.message;
    ASSERT_EQ(b.status, LLA_OK) << b.message;
    EXPECT_TRUE(identical(a.o, b.o)) << "relative difference " << relative_error(a.o, b.o);
  }
}

TEST_P(GpuShapes, IterationsAreCountedAndBounded) {
  Spec spec = bf16(600, 64);
  spec.options.solver = LLA_SOLVER_CG;
  spec.options.max_iterations = 2;
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::aniso, 0.01, 11);
  const Forward two = run_forward(spec, inputs, implementation());
  ASSERT_EQ(two.status, LLA_OK) << two.message;
  int spent = 0;
  for (size_t i = 0; i < two.info.iterations.size(); ++i) {
    EXPECT_LE(two.info.iterations[i], 2);
    if (two.info.status[i] == LLA_ROW_MAX_ITERATIONS) {
      ++spent;
      EXPECT_EQ(two.info.iterations[i], 2);
      EXPECT_GT(two.info.residual[i], spec.tolerance());
    }
  }
  EXPECT_GT(spent, 400);
  spec.options.max_iterations = 0;
  const Forward all = run_forward(spec, inputs, implementation());
  for (size_t i = 1; i < all.info.residual.size(); ++i) {
    if (all.info.status[i] != LLA_ROW_OK) continue;
    EXPECT_LE(all.info.residual[i], most_told(implementation(), spec)) << i;
  }
}

}  // namespace
}  // namespace lla::test
