// Attention with x given: the six data kinds, both types of x, logits that rise or fall by hundreds of powers of two
// along the keys (so that a running maximum keeps changing, in either direction of the walk), and the saved statistics.
#include <cmath>
#include <numbers>

#include "gpu/gpu_test.hpp"

namespace lla::test {
namespace {

constexpr DType kTypesOfX[] = {DType::none, DType::f32};

Spec given(int64_t length, int64_t dim, DType x_dtype = DType::none, DType dtype = DType::bf16) {
  Spec spec = self_attention(length, dim);
  spec.dtype = dtype;
  spec.out_dtype = DType::f32;
  spec.x_dtype = x_dtype;
  spec.ridge = RidgeShape::none;
  return spec;
}

// Logits of log2 units `at(row, key)` in dimension 0 (where queries hold 1), what the data kind gives in the others.
template <class Logit>
Inputs with_logits(Spec& spec, const Logit& at, double queries) {
  spec.options.scale = 1 / std::numbers::log2e;
  Inputs inputs = make_inputs(spec, data::Kind::randn, 0, 31);
  for (int64_t i = 0; i < spec.length_q; ++i) {
    for (int64_t d = 0; d < spec.dim; ++d) inputs.q[static_cast<size_t>(i * spec.dim + d)] *= queries;
    inputs.q[static_cast<size_t>(i * spec.dim)] = 1;
  }
  for (auto& q : inputs.q) q = rounded(q, spec.dtype);
  for (int64_t j = 0; j < spec.length_k; ++j) inputs.k[static_cast<size_t>(j * spec.dim)] = rounded(at(j), spec.dtype);
  // x ignores that dimension, so that E stays of order one.
  for (int64_t i = 0; i < spec.length_q; ++i) inputs.x[static_cast<size_t>(i * spec.dim)] = 0;
  return inputs;
}

class GpuGivenX : public OnGpu {
 protected:
  void expect_accurate(const Spec& spec, const Inputs& inputs, double gate) const {
    const Forward got = run_forward(spec, inputs, implementation(), {.saved = false, .info = true});
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    const Forward want = gpu_oracle_forward(spec, inputs);
    ASSERT_EQ(want.status, LLA_OK) << want.message;
    const Error error = compare(spec, Side::queries, spec.value_dim, got.o, want.o);
    EXPECT_LE(error.norm, gate) << spec.text();
    EXPECT_LE(error.row, 10 * gate) << "worst row, " << spec.text();
  }
};
LLA_EACH_CUDA_IMPLEMENTATION(GpuGivenX);

TEST_P(GpuGivenX, DataKinds) {
  for (const data::Kind kind : data::kinds) {
    for (const int64_t dim : {64, 128}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        for (const DType x_dtype : kTypesOfX) {
          SCOPED_TRACE(data::name(kind));
          const Spec spec = given(1500, dim, x_dtype, dtype);
          LLA_SKIP_UNLESS_TAKEN(spec);
          expect_accurate(spec, make_inputs(spec, kind, 0, 20261115), 5e-4);
        }
      }
    }
  }
}

// The maximum rises in every tile of the walk, whichever way it goes, or comes with the first or the last key alone.
TEST_P(GpuGivenX, MaximumThatMoves) {
  const auto ramp = [](double first, double last) {
    return [=](int64_t j) { return first + (last - first) * static_cast<double>(j) / 999; };
  };
  for (const int64_t dim : {64, 128}) {
    for (const double top : {20.0, 200.0, 2000.0}) {
      Spec spec = given(1000, dim);
      LLA_SKIP_UNLESS_TAKEN(spec);
      SCOPED_TRACE("from or to " + std::to_string(top));
      for (const double queries : {0.0, 0.1}) {
        expect_accurate(spec, with_logits(spec, ramp(-top, top), queries), 5e-4);
        expect_accurate(spec, with_logits(spec, ramp(top, -top), queries), 5e-4);
        const auto one_at = [&](int64_t key) { return [=](int64_t j) { return j == key ? top : -top; }; };
        expect_accurate(spec, with_logits(spec, one_at(0), queries), 5e-4);
        expect_accurate(spec, with_logits(spec, one_at(999), queries), 5e-4);
        expect_accurate(spec, with_logits(spec, one_at(500), queries), 5e-4);
      }
    }
  }
}

// Keys with a common mean thirty times their spread: only the difference of E from its mean matters.
TEST_P(GpuGivenX, LargeCommonMean) {
  for (const DType x_dtype : kTypesOfX) {
    const Spec spec = given(1000, 128, x_dtype, DType::f16);
    LLA_SKIP_UNLESS_TAKEN(spec);
    Inputs inputs = make_inputs(spec, data::Kind::randn, 0, 32);
    for (size_t i = 0; i < inputs.k.size(); ++i) {
      inputs.k[i] = rounded(inputs.k[i] + 30 * data::normal(33, 0, i % 128), spec.dtype);
      inputs.q[i] = rounded(inputs.q[i] / 30, spec.dtype);
    }
    expect_accurate(spec, inputs, 2e-3);
  }
}

// max, omega, means and x as the interface documents them, whatever the walk over the keys was.
TEST_P(GpuGivenX, SavedStatistics) {
  for (const DType x_dtype : kTypesOfX) {
    for (const double top : {0.0, 300.0}) {
      Spec spec = given(300, 64, x_dtype);
      spec.length_k = 280;  // the first rows see no key
      spec.value_dim = 40;
      LLA_SKIP_UNLESS_TAKEN(spec);
      const Inputs inputs = with_logits(
          spec, [&](int64_t j) { return top * static_cast<double>(j) / 280; }, 0.5);
      const Forward got = run_forward(spec, inputs, implementation());
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      const Forward want = oracle_forward(spec, inputs);
      ASSERT_EQ(got.saved.size(), want.saved.size());
      const size_t rows = 300;
      const auto at = [](int64_t offset) { return static_cast<size_t>(offset); };
      const size_t max = at(got.sizes.saved_max), omega = at(got.sizes.saved_omega),
                   mean_k = at(got.sizes.saved_mean_k), mean_v = at(got.sizes.saved_mean_v), x = at(got.sizes.saved_x);
      for (size_t r = 0; r < rows; ++r) {
        if (want.saved[omega + r] == 0) {
          EXPECT_EQ(got.saved[omega + r], 0) << "omega without keys, row " << r;
          continue;
        }
        EXPECT_EQ(got.saved[max + r], std::rint(got.saved[max + r])) << "max is an integer";
        EXPECT_NEAR(got.saved[max + r], want.saved[max + r], 1) << "row " << r;
        EXPECT_NEAR(got.saved[omega + r] * std::exp2(got.saved[max + r] - want.saved[max + r]) / want.saved[omega + r],
                    1, 1e-3)
            << r;
        EXPECT_LE(got.saved[omega + r], 280 * 1.001);
        EXPECT_GE(got.saved[omega + r], 0.499) << "max is the least integer above the logits, row " << r;
      }
      const auto section = [&](const std::vector<double>& t, size_t begin, size_t size) {
        return std::vector<double>(t.begin() + static_cast<int64_t>(begin),
                                   t.begin() + static_cast<int64_t>(begin + size));
      };
      EXPECT_LE(relative_error(section(got.saved, mean_k, rows * 64), section(want.saved, mean_k, rows * 64)), 1e-3);
      EXPECT_LE(relative_error(section(got.saved, mean_v, rows * 40), section(want.saved, mean_v, rows * 40)), 1e-3);
      for (size_t r = 0; r < rows; ++r) {
        if (want.saved[omega + r] == 0) continue;
        // Row 20 sees one key, where x does not matter: the portable implementation saves zero there.
        if (r == 20 && std::string(implementation()) == "cuda-portable") continue;
        EXPECT_EQ(section(got.saved, x + r * 64, 64), section(inputs.x, r * 64, 64)) << "x is the caller's, row " << r;
      }
    }
  }
}

// The gradients take what this forward saved, for both types of x. On self nearly all weight lies on one key.
TEST_P(GpuGivenX, Gradients) {
  for (const data::Kind kind : {data::Kind::cluster, data::Kind::self}) {
    for (const DType x_dtype : kTypesOfX) {
      for (const int64_t dim : {64, 128}) {
        SCOPED_TRACE(data::name(kind));
        const Spec spec = given(400, dim, x_dtype);
        LLA_SKIP_UNLESS_TAKEN(spec);
        const Inputs inputs = make_inputs(spec, kind, 0, 34);
        const Backward got = run_backward(spec, inputs, implementation());
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        expect_gradients(spec, got, gpu_oracle_backward(spec, inputs), 6e-3);
      }
    }
  }
}

TEST_P(GpuGivenX, OneVisibleKeyGivesItsValueExactly) {
  for (const int64_t dim : {64, 128}) {
    for (const DType x_dtype : kTypesOfX) {
      Spec spec = given(300, dim, x_dtype);
      spec.options.window_left = 0;
      LLA_SKIP_UNLESS_TAKEN(spec);
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0, 35);
      const Forward got = run_forward(spec, inputs, implementation());
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      EXPECT_EQ(got.o, inputs.v) << spec.text();
    }
  }
}

// A caller who wants no saved vector gets the same o.
TEST_P(GpuGivenX, SavingChangesNothing) {
  const Spec spec = given(700, 128);
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::self, 0, 36);
  const Forward with = run_forward(spec, inputs, implementation());
  const Forward without = run_forward(spec, inputs, implementation(), {.saved = false, .info = false});
  ASSERT_EQ(with.status, LLA_OK) << with.message;
  ASSERT_EQ(without.status, LLA_OK) << without.message;
  EXPECT_TRUE(identical(with.o, without.o));
}

}  // namespace
}  // namespace lla::test
