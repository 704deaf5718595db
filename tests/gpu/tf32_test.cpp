// f32 tensors where TF32 is allowed: the Hopper kernels take them, with eleven significant bits. Held to what rounding
// the inputs to TF32, and nothing else, does to the fp64 result.
#include <bit>
#include <cmath>

#include "gpu/gpu_test.hpp"

namespace lla::test {
namespace {

constexpr const char* kImplementation = "sm90";

class Tf32 : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
    if (!takes(kImplementation, spec(64))) GTEST_SKIP() << lla_last_error();
  }
  Spec spec(int64_t length) const {
    Spec s = self_attention(length, GetParam());
    s.dtype = DType::f32;
    s.ridge = RidgeShape::token;
    s.options.precision = LLA_PRECISION_TF32;
    return s;
  }
};

double to_tf32(double x) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  return std::bit_cast<float>((bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu);
}
std::vector<double> to_tf32(std::vector<double> x) {
  for (double& v : x) v = to_tf32(v);
  return x;
}
Inputs rounded_inputs(Inputs inputs) {
  for (auto* t : {&inputs.q, &inputs.k, &inputs.v, &inputs.grad_o}) *t = to_tf32(*t);
  return inputs;
}

// The solve has its own error, the tolerance's; beside it 1.5 times that of the inputs' rounding.
TEST_P(Tf32, AsAccurateAsRoundedInputsAllow) {
  for (const data::Kind kind : data::kinds) {
    for (const double ridge : {1.0, 0.1}) {
      Spec s = spec(700);
      s.options.tolerance = 1e-4;
      const Inputs inputs = make_inputs(s, kind, ridge, 20261116);
      SCOPED_TRACE(std::string(data::name(kind)) + ", ridge " + std::to_string(ridge));
      const Forward got = run_forward(s, inputs, kImplementation);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      for (const int status : got.info.status) ASSERT_EQ(status, LLA_ROW_OK);
      const Forward want = gpu_oracle_forward(s, inputs), rounded = gpu_oracle_forward(s, rounded_inputs(inputs));
      const double allowed = compare(s, Side::queries, s.value_dim, rounded.o, want.o).norm;
      EXPECT_LE(compare(s, Side::queries, s.value_dim, got.o, want.o).norm, 1.5 * allowed + s.options.tolerance);
      const Backward gradients = run_backward(s, inputs, got.saved, kImplementation);
      ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
      const Backward exact = gpu_oracle_backward(s, inputs), coarse = gpu_oracle_backward(s, rounded_inputs(inputs));
      const auto hold = [&](const char* name, Side side, int64_t width, const std::vector<double>& a,
                            const std::vector<double>& b, const std::vector<double>& c) {
        const double least = compare(s, side, width, c, b).norm;
        EXPECT_LE(compare(s, side, width, a, b).norm, 1.5 * least + 5 * s.options.tolerance / ridge) << name;
      };
      hold("dq", Side::queries, s.dim, gradients.dq, exact.dq, coarse.dq);
      hold("dk", Side::keys, s.dim, gradients.dk, exact.dk, coarse.dk);
      hold("dv", Side::keys, s.value_dim, gradients.dv, exact.dv, coarse.dv);
    }
  }
}

// Outputs and gradients are f32 numbers, not rounded ones: some have bits that TF32 does not.
TEST_P(Tf32, OutputsStayWide) {
  const Spec s = spec(200);
  const Inputs inputs = make_inputs(s, data::Kind::randn, 0.1, 3);
  const Forward got = run_forward(s, inputs, kImplementation);
  const Backward gradients = run_backward(s, inputs, got.saved, kImplementation);
  for (const auto* t : {&got.o, &gradients.dq, &gradients.dk, &gradients.dv}) {
    size_t wide = 0;
    for (const double x : *t) wide += x != to_tf32(x);
    EXPECT_GT(2 * wide, t->size());
  }
}

// Queries that see a key too small for its head's scale say so; the others do not.
TEST_P(Tf32, AKeyTooSmallForItsHeadIsReported) {
  Spec s = spec(96);
  const int64_t small = 40;
  Inputs inputs = make_inputs(s, data::Kind::randn, 0.1, 4);
  for (int64_t d = 0; d < s.dim; ++d) inputs.k[static_cast<size_t>(small * s.dim + d)] *= 0x1p-40;
  const Forward got = run_forward(s, inputs, kImplementation);
  ASSERT_EQ(got.status, LLA_OK) << got.message;
  for (int64_t i = 0; i < s.length_q; ++i) {
    EXPECT_EQ(got.info.status[static_cast<size_t>(i)] == LLA_ROW_PRECISION, i >= small) << "row " << i;
  }
  EXPECT_TRUE(all_finite(got.o));
}

// Without the caller's word f32 stays what it is.
TEST_P(Tf32, IsNotTakenUnasked) {
  Spec s = spec(64);
  s.options.precision = LLA_PRECISION_FULL;
  EXPECT_FALSE(takes(kImplementation, s));
}

INSTANTIATE_TEST_SUITE_P(Gpu, Tf32, testing::Values(64, 128),
                         [](const auto& info) { return "D" + std::to_string(info.param); });

}  // namespace
}  // namespace lla::test
