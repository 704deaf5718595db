// Every kernel once on problems of a few tiles: a list short enough for compute-sanitizer, whose racecheck slows
// kernels down a thousandfold. `compute-sanitizer --tool memcheck gpu_test --gtest_filter='Gpu/Sanitize*'`; racecheck
// wants a build with LLA_RACECHECK and has not been made to follow the kernels for caches, see docs/testing.md.
#include "gpu/cache_cases.hpp"
#include "gpu/gpu_test.hpp"

namespace lla::test {
namespace {

class Sanitize : public OnGpu {
 protected:
  // A full causal pass both ways; the numbers are other tests' business, written memory is not.
  void run(const Spec& spec) const {
    if (!takes(spec)) return;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 13);
    const Forward forward = run_forward(spec, inputs, implementation());
    ASSERT_EQ(forward.status, LLA_OK) << forward.message;
    EXPECT_TRUE(all_finite(forward.o)) << spec.text();
    const Backward gradients = run_backward(spec, inputs, forward.saved, implementation());
    ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
    for (const auto* t : {&gradients.dq, &gradients.dk, &gradients.dv, &gradients.dridge, &gradients.dx}) {
      EXPECT_TRUE(all_finite(*t)) << spec.text();
    }
  }
  static Spec small(int64_t dim, DType dtype, int solver) {
    Spec spec = self_attention(40, dim);
    spec.dtype = dtype;
    spec.heads_q = 2;
    spec.options.solver = solver;
    spec.options.max_iterations = 2;
    return spec;
  }
};
LLA_EACH_CUDA_IMPLEMENTATION(Sanitize);

TEST_P(Sanitize, ConjugateGradients) {
  for (const int64_t dim : {20, 64, 128, 200}) {
    for (const DType dtype : {DType::bf16, DType::f64}) run(small(dim, dtype, LLA_SOLVER_CG));
  }
}

TEST_P(Sanitize, Direct) {
  for (const int64_t dim : {20, 200}) run(small(dim, DType::f32, LLA_SOLVER_DIRECT));
}

TEST_P(Sanitize, Auto) { run(small(64, DType::bf16, LLA_SOLVER_AUTO)); }

TEST_P(Sanitize, GivenX) {
  for (const int64_t dim : {64, 128}) {
    for (const int64_t length : {100, 270}) {  // few keys or not
      Spec spec = small(dim, DType::bf16, LLA_SOLVER_AUTO);
      spec.length_q = spec.length_k = length;
      spec.ridge = RidgeShape::none;
      run(spec);
    }
  }
}

// Longer than one tile of the tensor-core kernels on either side, and not a multiple of it; each of their kernels has a
// variant that keeps the weights and one that makes them again.
TEST_P(Sanitize, SeveralTiles) {
  for (const int64_t dim : {64, 128}) {
    for (const int weights : {LLA_WEIGHTS_CACHED, LLA_WEIGHTS_RECOMPUTE}) {
      Spec spec = small(dim, DType::bf16, LLA_SOLVER_AUTO);
      spec.length_q = spec.length_k = 270;
      spec.heads_q = spec.heads_kv = 1;
      spec.ridge = RidgeShape::head;
      spec.options.weights = weights;
      run(spec);
    }
  }
}

TEST_P(Sanitize, Packed) {
  Spec spec = small(64, DType::f16, LLA_SOLVER_AUTO);
  spec.cu_q = {0, 0, 9, 40};
  spec.cu_k = {0, 2, 9, 40};
  spec.ridge = RidgeShape::dimension;
  run(spec);
}

class SanitizeCaches : public OnGpu {
 protected:
  void run(const CacheSpec& spec) const {
    if (!takes_cache(implementation(), spec)) return;
    const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.5, 13);
    const CacheForward got = run_cache(spec, inputs, implementation());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (const auto& o : got.o) EXPECT_TRUE(all_finite(o)) << spec.text();
  }
  // However rows can lie: contiguous, in pages the copy engine takes and in those it does not, and as it takes none.
  void run_everywhere(CacheSpec spec) const {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      spec.ridge = ridge;
      for (const int64_t page_size : {0, 16, 1}) {
        spec.page_size = page_size;
        spec.layout = Layout::dense;
        run(spec);
      }
      spec.page_size = 0;
      spec.layout = Layout::scattered;
      run(spec);
    }
  }
};
LLA_EACH_CUDA_IMPLEMENTATION(SanitizeCaches);

TEST_P(SanitizeCaches, SingleRows) {
  for (const int64_t dim : {64, 128}) run_everywhere(bf16_cache(dim, {{1, 300}, {1, 5}}, 0));
}

TEST_P(SanitizeCaches, Groups) {
  for (const int64_t dim : {64, 128}) {
    CacheSpec spec = bf16_cache(dim, {{1, 300}, {1, 5}}, 0);
    spec.heads_q = 4 * spec.heads_kv;
    run_everywhere(spec);
  }
}

// More rows than decode takes beside one that it does.
TEST_P(SanitizeCaches, Prompts) {
  for (const int64_t dim : {64, 128}) {
    CacheSpec spec = bf16_cache(dim, {{70, 200}, {1, 90}}, 0);
    spec.packed = true;
    run_everywhere(spec);
  }
}

}  // namespace
}  // namespace lla::test
