// A power of two on an input is a power of two on the results, bit for bit: nothing a kernel squares, rounds or
// compares may depend on the size of gradients, values or keys. What is not finite stays so, and what is too large
// becomes infinite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/text.hpp"
#include "support/floats.hpp"
#include "support/gates.hpp"

namespace lla::test {
namespace {

using Values = std::vector<double>;

Values times(Values values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

// Where two results of one type must agree: got = factor * base wherever both are normal numbers or zero, got infinite
// where that is too large; among the subnormal numbers, which scaling rounds, to their unit.
void expect_scaled(const char* what, const Values& base, const Values& got, double factor, DType dtype) {
  ASSERT_EQ(base.size(), got.size()) << what;
  const FloatRange range = range_of(dtype);
  size_t wrong = 0, first = 0;
  for (size_t i = 0; i < base.size(); ++i) {
    const double want = base[i] * factor;
    bool same = false;
    if (std::abs(want) > range.largest) {
      same = got[i] == std::copysign(std::numeric_limits<double>::infinity(), want);
    } else if (std::min(std::abs(base[i]), std::abs(want)) >= range.smallest_normal) {
      same = got[i] == want;
    } else {
      same = std::abs(got[i] - want) <= range.smallest * std::max(1.0, factor);
    }
    if (same) continue;
    if (wrong++ == 0) first = i;
  }
  EXPECT_EQ(wrong, 0u) << what << " of " << base.size() << "; element " << first << " is " << got[first] << ", wanted "
                       << base[first] * factor;
}

void expect_same_info(const RowInfo& base, const RowInfo& got) {
  EXPECT_EQ(base.status, got.status);
  EXPECT_EQ(base.iterations, got.iterations);
  EXPECT_EQ(base.residual, got.residual);
}

// What a gradient is multiplied by: factors of dq, dk, dv and of dridge or dx.
struct Factors {
  double q, k, v, other;
};

void expect_scaled(const Spec& spec, const Backward& base, const Backward& got, Factors factors) {
  expect_scaled("dq", base.dq, got.dq, factors.q, spec.output());
  expect_scaled("dk", base.dk, got.dk, factors.k, spec.output());
  expect_scaled("dv", base.dv, got.dv, factors.v, spec.output());
  expect_scaled("dridge", base.dridge, got.dridge, factors.other, spec.ridge_dtype());
  expect_scaled("dx", base.dx, got.dx, factors.other, spec.output());
  expect_same_info(base.info, got.info);
}

// Numbers small enough to become subnormal when scaled become zero.
void flush_small(Values& values, double below) {
  for (double& value : values) {
    if (std::abs(value) < below) value = 0;
  }
}

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

std::vector<Spec> problems() {
  std::vector<Spec> list;
  size_t turn = 0;
  for (const DType dtype : kTypes) {
    for (const RidgeShape ridge :
         {RidgeShape::token, RidgeShape::dimension, RidgeShape::scalar, RidgeShape::head, RidgeShape::none}) {
      Spec spec = self_attention(reduced() ? 40 : 72, 64);
      spec.heads_q = 2;
      spec.dtype = dtype;
      spec.ridge = ridge;
      // In turn: solvers, output types, dimensions.
      spec.options.solver = turn % 3 == 2 ? LLA_SOLVER_CG : LLA_SOLVER_AUTO;
      spec.out_dtype = turn % 2 == 1 && dtype != DType::f64 ? DType::f32 : DType::none;
      spec.x_dtype = spec.out_dtype;
      if (turn % 4 == 3) spec.dim = spec.value_dim = 128;
      if (turn % 7 == 6) spec.options.window_left = 20;
      spec.options.scale = 1 / std::sqrt(static_cast<double>(spec.dim));
      list.push_back(spec);
      ++turn;
    }
  }
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none, RidgeShape::dimension, RidgeShape::head}) {
    Spec spec = self_attention(reduced() ? 40 : 72, turn % 2 == 0 ? 64 : 128);  // f32 with TF32's eleven bits
    spec.ridge = ridge;
    spec.options.precision = LLA_PRECISION_TF32;
    spec.options.scale = 1 / std::sqrt(static_cast<double>(spec.dim));
    list.push_back(spec);
    ++turn;
  }
  Spec odd = self_attention(50, 24, 2);  // not for tensor cores
  odd.value_dim = 20;
  odd.length_k = 61;
  odd.ridge = RidgeShape::token;
  odd.options.scale = 0.2;
  list.push_back(odd);
  odd.options.tolerance = 1e-6;
  odd.options.solver = LLA_SOLVER_DIRECT;
  list.push_back(odd);
  return list;
}

constexpr data::Kind kKinds[] = {data::Kind::randn, data::Kind::equal_values, data::Kind::mean, data::Kind::padding};

bool without_gradient(size_t token) { return token % 5 == 3; }

// Rows of different size, some of them zero, no element beneath 2^-22 of the largest (2^-9 in f16).
Inputs inputs_of(const Spec& spec, data::Kind kind, uint64_t seed) {
  Inputs inputs = make_inputs(spec, kind, 0.5, seed);
  const bool narrow = spec.dtype == DType::f16;
  for (Values* values : {&inputs.q, &inputs.k, &inputs.v, &inputs.grad_o, &inputs.x}) flush_small(*values, 0x1p-6);
  const auto width = static_cast<size_t>(spec.value_dim);
  for (size_t i = 0; i < inputs.grad_o.size(); ++i) {
    const size_t row = i / width / static_cast<size_t>(spec.heads_q);
    inputs.grad_o[i] *=
        without_gradient(row) ? 0 : std::ldexp(1.0, -static_cast<int>(row % (narrow ? 2 : 4)) * (narrow ? 1 : 5));
  }
  return inputs;
}

class Scale : public EachImplementation {
 protected:
  template <class Body>
  void each_problem(const Body& body) const {
    uint64_t seed = 1;
    for (const Spec& spec : problems()) {
      const data::Kind kind = kKinds[seed % std::size(kKinds)];
      ++seed;
      if (!takes(spec)) continue;
      SCOPED_TRACE(core::cat(data::name(kind), ", ", spec.text()));
      body(spec, inputs_of(spec, kind, seed));
    }
  }
  Backward backward_of(const Spec& spec, const Inputs& inputs, const Forward& forward) const {
    Backward result = run_backward(spec, inputs, forward.saved, GetParam());
    if (result.status != LLA_OK) throw std::runtime_error(result.message);
    return result;
  }
};
LLA_EACH_IMPLEMENTATION(Scale);

TEST_P(Scale, OfTheGradient) {
  each_problem([&](const Spec& spec, const Inputs& inputs) {
    const Forward saved = forward(spec, inputs);
    const Backward base = backward_of(spec, inputs, saved);
    const std::vector<int> powers =
        spec.dtype == DType::f16 ? std::vector{-7, -1, 6, 12} : std::vector{-100, -61, -24, -1, 7, 30, 60};
    for (const int m : powers) {
      SCOPED_TRACE(core::cat("gradients times 2^", m));
      const double factor = std::ldexp(1.0, m);
      Inputs scaled = inputs;
      scaled.grad_o = times(inputs.grad_o, factor);
      expect_scaled(spec, base, backward_of(spec, scaled, saved), {factor, factor, factor, factor});
    }
  });
}

TEST_P(Scale, OfTheValues) {
  each_problem([&](const Spec& spec, const Inputs& inputs) {
    const Forward base = forward(spec, inputs);
    const Backward base_gradients = backward_of(spec, inputs, base);
    for (const int m : spec.dtype == DType::f16 ? std::vector{-7, 3, 9} : std::vector{-60, -20, -3, 5, 20, 60}) {
      SCOPED_TRACE(core::cat("values times 2^", m));
      const double factor = std::ldexp(1.0, m);
      Inputs scaled = inputs;
      scaled.v = times(inputs.v, factor);
      const Forward got = forward(spec, scaled);
      expect_scaled("o", base.o, got.o, factor, spec.output());
      expect_same_info(base.info, got.info);
      expect_scaled(spec, base_gradients, backward_of(spec, scaled, got), {factor, factor, 1, factor});
    }
  });
}

TEST_P(Scale, OfQueriesAndKeys) {
  each_problem([&](const Spec& spec, const Inputs& inputs) {
    const Forward base = forward(spec, inputs);
    const Backward base_gradients = backward_of(spec, inputs, base);
    for (const int m : spec.dtype == DType::f16 ? std::vector{-7, 3} : std::vector{-15, -4, 3, 15}) {
      SCOPED_TRACE(core::cat("queries and keys times 2^", m));
      const double factor = std::ldexp(1.0, m);
      Spec scaled_spec = spec;
      scaled_spec.options.scale = spec.options.scale / factor / factor;
      Inputs scaled = inputs;
      scaled.q = times(inputs.q, factor);
      scaled.k = times(inputs.k, factor);
      scaled.ridge = times(inputs.ridge, factor * factor);
      scaled.x = times(inputs.x, 1 / factor);
      const Forward got = forward(scaled_spec, scaled);
      expect_scaled("o", base.o, got.o, 1, spec.output());
      expect_same_info(base.info, got.info);
      const double given = spec.ridge == RidgeShape::none ? factor : 1 / factor / factor;
      expect_scaled(spec, base_gradients, backward_of(scaled_spec, scaled, got), {1 / factor, 1 / factor, 1, given});
    }
  });
}

// ---- rows without a gradient
// -----------------------------------------------------------------------------------------

bool all_zero(const Values& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return x == 0; });
}

// The statistics of rows that have a gradient, from another forward.
void keep_rows_with_gradient(const Spec& spec, Forward& to, const Values& from) {
  const auto take = [&](int64_t section, int64_t width) {
    for (int64_t row = 0; row < spec.rows(); ++row) {
      const int64_t b = row / spec.length_q / spec.heads_q, i = row % spec.length_q;
      if (without_gradient(static_cast<size_t>(b * spec.length_q + i))) continue;
      const int64_t at = section + row * width;
      std::copy_n(from.begin() + at, width, to.saved.begin() + at);
    }
  };
  take(to.sizes.saved_max, 1);
  take(to.sizes.saved_omega, 1);
  take(to.sizes.saved_mean_k, spec.dim);
  take(to.sizes.saved_mean_v, spec.value_dim);
  take(to.sizes.saved_x, spec.dim);
}

TEST_P(Scale, RowsWithoutAGradientChangeNothing) {
  each_problem([&](const Spec& spec, const Inputs& inputs) {
    const Forward first = forward(spec, inputs);
    const Backward base = backward_of(spec, inputs, first);
    Inputs other = inputs;
    const auto width = static_cast<size_t>(spec.dim * spec.heads_q);
    for (size_t i = 0; i < other.q.size(); ++i) {
      if (without_gradient(i / width)) other.q[i] = rounded(20 * data::normal(99, 0, i), spec.dtype);
    }
    // Hopper decides for 64 rows at a time how they are solved, so that their bits there may change with a neighbour's
    // query. In the backward they may not.
    Forward second = forward(spec, other);
    const Values own = second.saved;
    keep_rows_with_gradient(spec, second, first.saved);
    if (GetParam() != "sm90") {
      EXPECT_EQ(second.saved, own);
    }
    const Backward got = backward_of(spec, other, second);
    expect_scaled("dq", base.dq, got.dq, 1, spec.output());
    expect_scaled("dk", base.dk, got.dk, 1, spec.output());
    expect_scaled("dv", base.dv, got.dv, 1, spec.output());
    expect_scaled("dridge", base.dridge, got.dridge, 1, spec.ridge_dtype());
    expect_scaled("dx", base.dx, got.dx, 1, spec.output());
    for (const Backward* result : {&base, &got}) {
      for (int64_t row = 3; row < spec.length_q; row += 5) {
        for (int64_t h = 0; h < spec.heads_q; ++h) {
          EXPECT_TRUE(all_zero(row_of(spec, Side::queries, spec.dim, result->dq, 0, row, h))) << "dq of row " << row;
          EXPECT_EQ(result->info.status[static_cast<size_t>(h * spec.length_q + row)], LLA_ROW_OK) << "row " << row;
          if (spec.ridge == RidgeShape::token || spec.ridge == RidgeShape::dimension) {
            const int64_t channels = spec.ridge == RidgeShape::token ? 1 : spec.dim;
            EXPECT_TRUE(all_zero(row_of(spec, Side::queries, channels, result->dridge, 0, row, h)))
                << "dridge of row " << row;
          }
        }
      }
    }
  });
}

TEST_P(Scale, NoGradientAtAll) {
  each_problem([&](const Spec& spec, Inputs inputs) {
    std::fill(inputs.grad_o.begin(), inputs.grad_o.end(), 0.0);
    const Backward got = backward(spec, inputs);
    for (const Values* values : {&got.dq, &got.dk, &got.dv, &got.dridge, &got.dx}) EXPECT_TRUE(all_zero(*values));
    EXPECT_EQ(got.info.status, std::vector<int>(got.info.status.size(), LLA_ROW_OK));
  });
}

// ---- not finite, too large
// -------------------------------------------------------------------------------------------

bool none_finite(const Values& values) {
  return std::none_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

// GradScaler finds an overflow by what is not finite in the gradients: it may not get lost on the way.
TEST_P(Scale, WhatIsNotFiniteStaysSo) {
  each_problem([&](const Spec& spec, const Inputs& inputs) {
    const Forward saved = forward(spec, inputs);
    const int64_t row = spec.length_q / 2, head = spec.heads_q - 1, channel = 5;
    for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      SCOPED_TRACE(bad);
      Inputs hit = inputs;
      hit.grad_o[static_cast<size_t>((row * spec.heads_q + head) * spec.value_dim + channel)] = bad;
      const Backward got = backward_of(spec, hit, saved);
      for (int64_t i = 0; i < spec.length_q; ++i) {
        for (int64_t h = 0; h < spec.heads_q; ++h) {
          const Values dq = row_of(spec, Side::queries, spec.dim, got.dq, 0, i, h);
          EXPECT_TRUE(i == row && h == head ? none_finite(dq) : all_finite(dq)) << "dq of row " << i << ", head " << h;
          if (spec.ridge == RidgeShape::token) {
            const Values dridge = row_of(spec, Side::queries, 1, got.dridge, 0, i, h);
            EXPECT_TRUE(i == row && h == head ? none_finite(dridge) : all_finite(dridge)) << "dridge of row " << i;
          }
        }
      }
      if (spec.ridge == RidgeShape::scalar || spec.ridge == RidgeShape::head) {
        EXPECT_FALSE(std::isfinite(got.dridge.back()));
      }
      const int64_t diagonal = row + spec.length_k - spec.length_q, left = spec.options.window_left;
      for (int64_t j = 0; j < spec.length_k; ++j) {
        const int64_t kv_head = head / (spec.heads_q / spec.heads_kv);
        const bool seen = j <= diagonal && (left < 0 || j >= diagonal - left);
        const Values dk = row_of(spec, Side::keys, spec.dim, got.dk, 0, j, kv_head);
        const Values dv = row_of(spec, Side::keys, spec.value_dim, got.dv, 0, j, kv_head);
        EXPECT_TRUE(seen ? none_finite(dk) : all_finite(dk)) << "dk of key " << j;
        EXPECT_TRUE(seen ? !std::isfinite(dv[static_cast<size_t>(channel)]) : all_finite(dv)) << "dv of key " << j;
      }
    }
  });
}

// Twice the largest number, or more, is infinity; half of it, or less, is finite.
size_t expect_no_saturation(const char* what, const Values& got, const Values& want, DType dtype) {
  const double largest = range_of(dtype).largest;
  size_t overflows = 0, wrong = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::abs(want[i]) > 2 * largest) {
      ++overflows;
      wrong += got[i] != std::copysign(std::numeric_limits<double>::infinity(), want[i]);
    } else if (std::abs(want[i]) < largest / 2) {
      wrong += !std::isfinite(got[i]);
    }
  }
  EXPECT_EQ(wrong, 0u) << what << " of " << want.size();
  return overflows;
}

TEST_P(Scale, TooLargeIsInfinite) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      Spec spec = self_attention(64, 64);
      spec.dtype = dtype;
      spec.ridge = ridge;
      if (!takes(spec)) continue;
      SCOPED_TRACE(spec.text());
      Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 5);
      const bool narrow = dtype == DType::f16;
      inputs.v = times(inputs.v, narrow ? 0x1p6 : 0x1p30);
      inputs.grad_o = times(inputs.grad_o, narrow ? 0x1p9 : 0x1p98);
      const Backward got = backward(spec, inputs), want = oracle_backward(spec, inputs);
      const size_t overflows = expect_no_saturation("dq", got.dq, want.dq, spec.output()) +
                               expect_no_saturation("dk", got.dk, want.dk, spec.output());
      expect_no_saturation("dv", got.dv, want.dv, spec.output());
      expect_no_saturation("dridge", got.dridge, want.dridge, spec.ridge_dtype());
      expect_no_saturation("dx", got.dx, want.dx, spec.output());
      EXPECT_GT(overflows, 0u) << "the case is too small to test anything";
    }
  }
}

TEST_P(Scale, AnOutputTooLargeIsInfinite) {
  Spec spec = self_attention(64, 64);
  spec.dtype = DType::f16;
  spec.ridge = RidgeShape::none;
  if (!takes(spec)) GTEST_SKIP() << "no f16 here";
  Inputs inputs = make_inputs(spec, data::Kind::randn, 0, 5);
  inputs.v = times(inputs.v, 0x1p13);
  inputs.x = times(inputs.x, 0x1p3);
  const Forward got = forward(spec, inputs), want = oracle_forward(spec, inputs);
  EXPECT_GT(expect_no_saturation("o", got.o, want.o, DType::f16), 0u) << "the case is too small to test anything";
}

}  // namespace
}  // namespace lla::test
