// The accuracy the project promises on a GPU: 16-bit inputs, fp32 results, six data kinds, three ridges, default
// tolerance. Against fp64 on the same values; relative norms per head, and the worst row.
#include <cmath>
#include <map>
#include <tuple>

#include "gpu/gpu_test.hpp"
#include "reference/reference.hpp"

namespace lla::test {
namespace {

struct Ridge {
  double value, output, gradient, tight_gradient;  // gates: forward; backward at tolerance 1e-3 and 1e-4
};
constexpr Ridge kRidges[] = {{1.0, 2e-3, 6e-3, 2e-3}, {0.1, 2e-3, 2e-2, 5e-3}, {0.01, 4e-3, 1.2e-1, 2e-2}};

Spec grid_spec(DType dtype, int64_t length, int64_t dim) {
  Spec spec = self_attention(length, dim);
  spec.dtype = dtype;
  spec.out_dtype = DType::f32;
  spec.ridge = RidgeShape::token;
  return spec;
}

// Making the data takes longer than the kernels; cases that differ in the ridge only share it.
const Inputs& grid_inputs(const Spec& spec, data::Kind kind, double ridge) {
  static std::map<std::tuple<int, int64_t, int64_t, int>, Inputs> made;
  auto& inputs = made[{static_cast<int>(spec.dtype), spec.length_q, spec.dim, static_cast<int>(kind)}];
  if (inputs.q.empty()) inputs = make_inputs(spec, kind, ridge, 20261115);
  inputs.ridge.assign(static_cast<size_t>(spec.rows()), rounded(ridge, DType::f32));
  return inputs;
}

class GpuAccuracy : public testing::TestWithParam<std::tuple<std::string, data::Kind, int>> {
 protected:
  void SetUp() override {
    if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  }
  const std::string& implementation() const { return std::get<0>(GetParam()); }
  data::Kind kind() const { return std::get<1>(GetParam()); }
  int dim() const { return std::get<2>(GetParam()); }

  void forward_grid(DType dtype, int64_t length) const {
    for (const Ridge& ridge : kRidges) {
      const Spec spec = grid_spec(dtype, length, dim());
      if (!takes(implementation(), spec)) GTEST_SKIP() << lla_last_error();
      const Inputs& inputs = grid_inputs(spec, kind(), ridge.value);
      const Forward got = run_forward(spec, inputs, implementation(), {.saved = false, .info = true});
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      const Forward want = gpu_oracle_forward(spec, inputs);
      ASSERT_EQ(want.status, LLA_OK) << want.message;
      const Error error = compare(spec, Side::queries, spec.value_dim, got.o, want.o);
      EXPECT_LE(error.norm, ridge.output) << "ridge " << ridge.value << ", " << spec.text();
      EXPECT_LE(error.row, 10 * ridge.output) << "worst row, ridge " << ridge.value << ", " << spec.text();
    }
  }

  // What each row says of itself fits together, and most rows were solved.
  void expect_honest(const RowInfo& info, const Spec& spec) const {
    size_t solved = 0;
    for (size_t i = 0; i < info.status.size(); ++i) {
      switch (info.status[i]) {
        case LLA_ROW_OK:
          ++solved;
          EXPECT_LE(info.residual[i], most_told(implementation(), spec)) << "row " << i;  // -1 where solved directly
          break;
        case LLA_ROW_MAX_ITERATIONS:
          EXPECT_EQ(info.iterations[i], spec.options.max_iterations) << "row " << i;
          EXPECT_GT(info.residual[i], spec.tolerance()) << "row " << i;
          break;
        default: EXPECT_EQ(info.status[i], LLA_ROW_BREAKDOWN) << "row " << i;
      }
    }
    EXPECT_GT(2 * solved, info.status.size()) << "rows solved";
  }

  void backward_grid(double tolerance, int64_t length) const {
    for (const Ridge& ridge : kRidges) {
      Spec spec = grid_spec(DType::bf16, length, dim());
      spec.options.tolerance = tolerance;
      if (!takes(implementation(), spec)) GTEST_SKIP() << lla_last_error();
      const double gate = tolerance > 5e-4 ? ridge.gradient : ridge.tight_gradient;
      SCOPED_TRACE("ridge " + std::to_string(ridge.value));
      const Inputs& inputs = grid_inputs(spec, kind(), ridge.value);
      const Backward got = run_backward(spec, inputs, implementation());
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      const Backward want = gpu_oracle_backward(spec, inputs);
      ASSERT_EQ(want.status, LLA_OK) << want.message;
      expect_gradients(spec, got, want, gate);
    }
  }
};

TEST_P(GpuAccuracy, ForwardBf16) { forward_grid(DType::bf16, 2048); }
TEST_P(GpuAccuracy, ForwardF16) { forward_grid(DType::f16, 2048); }
TEST_P(GpuAccuracy, ForwardBf16Long) { forward_grid(DType::bf16, 4096); }
TEST_P(GpuAccuracy, BackwardAtTheDefaultTolerance) { backward_grid(1e-3, 1024); }
TEST_P(GpuAccuracy, BackwardAtATightTolerance) { backward_grid(1e-4, 1024); }
TEST_P(GpuAccuracy, BackwardLong) { backward_grid(1e-3, 2048); }

// Outputs in the inputs' type add no more than their own rounding: relative 2^-9 / sqrt(3) rms for bf16, 2^-12 /
// sqrt(3) for f16.
TEST_P(GpuAccuracy, OutputsInTheInputType) {
  for (const auto& [dtype, rounding] : {std::pair{DType::bf16, 1.2e-3}, std::pair{DType::f16, 1.5e-4}}) {
    for (const Ridge& ridge : kRidges) {
      Spec spec = grid_spec(dtype, 1024, dim());
      spec.out_dtype = DType::none;
      if (!takes(implementation(), spec)) GTEST_SKIP() << lla_last_error();
      const Inputs& inputs = grid_inputs(spec, kind(), ridge.value);
      const Forward got = run_forward(spec, inputs, implementation(), {.saved = false, .info = false});
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      expect_output(spec, got.o, gpu_oracle_forward(spec, inputs).o, ridge.output + rounding);
    }
  }
}

// Below the promised ridges finite numbers and honest reports are asked.
TEST_P(GpuAccuracy, TinyRidgesStayFinite) {
  for (const double ridge : {1e-3, 1e-4}) {
    Spec spec = grid_spec(DType::bf16, 1024, dim());
    spec.options.max_iterations = 2 * dim();
    if (!takes(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    SCOPED_TRACE("ridge " + std::to_string(ridge) + ", " + spec.text());
    const Inputs& inputs = grid_inputs(spec, kind(), ridge);
    const Forward forward = run_forward(spec, inputs, implementation());
    ASSERT_EQ(forward.status, LLA_OK) << forward.message;
    EXPECT_TRUE(all_finite(forward.o));
    expect_honest(forward.info, spec);
    const Backward got = run_backward(spec, inputs, forward.saved, implementation());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (const auto* t : {&got.dq, &got.dk, &got.dv, &got.dridge}) EXPECT_TRUE(all_finite(*t));
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuAccuracy,
                         testing::Combine(testing::ValuesIn(cuda_implementations()), testing::ValuesIn(data::kinds),
                                          testing::Values(64, 128)),
                         [](const auto& info) {
                           return test_name(std::get<0>(info.param)) + "_" + data::name(std::get<1>(info.param)) + "_" +
                                  std::to_string(std::get<2>(info.param));
                         });

// The oracle of this file is itself CUDA code: rows of it against the CPU reference.
TEST(GpuOracle, AgreesWithTheReference) {
  if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  for (const data::Kind kind : data::kinds) {
    const int64_t length = 2048, dim = 128;
    const Spec spec = grid_spec(DType::bf16, length, dim);
    const Inputs inputs = make_inputs(spec, kind, 0.01, 20261115);
    const Forward got = gpu_oracle_forward(spec, inputs);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (const int64_t row : {int64_t{0}, int64_t{1}, int64_t{100}, int64_t{129}, int64_t{700}, length - 1}) {
      const auto part = [](const std::vector<double>& from, int64_t begin, int64_t end) {
        return std::vector<double>(from.begin() + begin, from.begin() + end);
      };
      reference::Head head;
      head.length_q = 1;
      head.length_k = row + 1;
      head.dim = head.value_dim = dim;
      head.q = part(inputs.q, row * dim, (row + 1) * dim);
      head.k = part(inputs.k, 0, (row + 1) * dim);
      head.v = part(inputs.v, 0, (row + 1) * dim);
      head.ridge.assign(static_cast<size_t>(dim), inputs.ridge[static_cast<size_t>(row)]);
      head.scale = 1 / std::sqrt(static_cast<double>(dim));
      EXPECT_LE(relative_error(part(got.o, row * dim, (row + 1) * dim), reference::forward(head, {}).o), 1e-9)
          << data::name(kind) << ", row " << row;
    }
  }
}

}  // namespace
}  // namespace lla::test
