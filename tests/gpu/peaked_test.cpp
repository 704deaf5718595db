// What trained attention looks like, on a GPU: 16-bit inputs, fp32 results, lengths the CPU's tests do not reach.
// Outputs at the default tolerance, gradients at 1e-4, against fp64 on the same values.
#include <algorithm>
#include <tuple>

#include "gpu/gpu_test.hpp"

namespace lla::test {
namespace {

struct Gate {
  double ridge, output, dq_dk, dv, dridge;
};
constexpr Gate kGates[] = {
    {1.0, 3e-3, 1e-2, 5e-3, 2e-2}, {0.1, 3e-3, 1e-2, 5e-3, 2e-2}, {0.01, 3e-3, 3e-2, 1.5e-2, 6e-2}};

class GpuPeaked : public testing::TestWithParam<std::tuple<std::string, data::Kind, int>> {
 protected:
  void SetUp() override {
    if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  }
  const std::string& implementation() const { return std::get<0>(GetParam()); }
  data::Kind kind() const { return std::get<1>(GetParam()); }

  Spec spec(int64_t length) const {
    Spec spec = self_attention(length, std::get<2>(GetParam()));
    spec.dtype = DType::bf16;
    spec.out_dtype = DType::f32;
    spec.ridge = RidgeShape::token;
    return spec;
  }
};

TEST_P(GpuPeaked, Forward) {
  for (const int64_t length : {256, 1024, 2048}) {
    const Spec spec = this->spec(length);
    if (!takes(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    for (const Gate& gate : kGates) {
      const Inputs inputs = make_inputs(spec, kind(), gate.ridge, 20261116);
      const Forward got = run_forward(spec, inputs, implementation());
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      SCOPED_TRACE("ridge " + std::to_string(gate.ridge));
      expect_output(spec, got.o, gpu_oracle_forward(spec, inputs).o, gate.output);
    }
  }
}

TEST_P(GpuPeaked, Backward) {
  for (const int64_t length : {256, 1024}) {
    Spec spec = this->spec(length);
    spec.options.tolerance = 1e-4;
    if (!takes(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    for (const Gate& gate : kGates) {
      const Inputs inputs = make_inputs(spec, kind(), gate.ridge, 20261116);
      const Backward got = run_backward(spec, inputs, implementation());
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      const Backward want = gpu_oracle_backward(spec, inputs);
      ASSERT_EQ(want.status, LLA_OK) << want.message;
      const auto error = [&](Side side, const std::vector<double>& a, const std::vector<double>& b) {
        return compare(spec, side, spec.dim, a, b).norm;
      };
      const std::string where = "ridge " + std::to_string(gate.ridge) + ", " + spec.text();
      EXPECT_LE(error(Side::queries, got.dq, want.dq), gate.dq_dk) << "dq, " << where;
      EXPECT_LE(error(Side::keys, got.dk, want.dk), gate.dq_dk) << "dk, " << where;
      EXPECT_LE(error(Side::keys, got.dv, want.dv), gate.dv) << "dv, " << where;
      EXPECT_LE(ridge_error(got, want), gate.dridge) << "dridge, " << where;
    }
  }
}

// A row is not to be doubted without cause, either: at the smallest ridge of the layer nearly all rows of these kinds
// are right (core/peaked_test has their errors), and say so.
TEST(GpuPeakedStatus, RowsAreNotDoubtedWithoutCause) {
  if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  struct Doubt {
    data::Kind kind;
    int64_t dim;
    double share;  // of rows that may
  };
  constexpr Doubt doubts[] = {{data::Kind::randn, 64, 0},
                              {data::Kind::rope, 64, 0.02},
                              {data::Kind::sink, 64, 0.02},
                              {data::Kind::sink, 128, 0.05}};
  for (const std::string& name : cuda_implementations()) {
    for (const Doubt& doubt : doubts) {
      Spec spec = self_attention(140, doubt.dim);
      spec.dtype = DType::bf16;
      spec.out_dtype = DType::f32;
      if (!takes(name, spec)) continue;
      const Forward got = run_forward(spec, make_inputs(spec, doubt.kind, 1e-3, 5), name);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      const auto doubted = std::ranges::count_if(got.info.status, [](int status) { return status != LLA_ROW_OK; });
      EXPECT_LE(static_cast<double>(doubted), doubt.share * 140) << name << ", " << data::name(doubt.kind);
    }
  }
}

// The kinds of the promise: channels of size 1e2 ... 1e-4 are held to their statuses only (core/peaked_test).
std::vector<data::Kind> promised() {
  std::vector<data::Kind> kinds(std::begin(data::peaked_kinds), std::end(data::peaked_kinds));
  std::erase(kinds, data::Kind::channel_scales);
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuPeaked,
                         testing::Combine(testing::ValuesIn(cuda_implementations()), testing::ValuesIn(promised()),
                                          testing::Values(64, 128)),
                         [](const auto& info) {
                           return test_name(std::get<0>(info.param)) + "_" + data::name(std::get<1>(info.param)) + "_" +
                                  std::to_string(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace lla::test
