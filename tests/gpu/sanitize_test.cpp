// Every kernel once on problems of a few tiles: a list short enough for compute-sanitizer, whose racecheck slows
// kernels down a thousandfold. `compute-sanitizer --tool memcheck gpu_test --gtest_filter='Gpu/Sanitize.*'`; racecheck
// wants a build with LLA_RACECHECK, see docs/testing.md.
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

}  // namespace
}  // namespace lla::test
