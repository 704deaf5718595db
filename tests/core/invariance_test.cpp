// The same problem written differently gives the same result: order of keys, batch, packing, strides, GQA, chunks,
// threads, options that only change how it is computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "support/gates.hpp"

namespace lla::test {
namespace {

class Invariance : public EachImplementation {
 protected:
  // Same outputs and gradients, to rounding. Each spec says how its tensors are to be compared.
  void expect_same(const Spec& spec, const Forward& got, const Forward& want) const {
    const double gate = rounding_gate(spec.dtype);
    expect_output(spec, got.o, want.o, gate);
  }
  void expect_same(const Spec& spec, const Backward& got, const Backward& want) const {
    expect_gradients(spec, got, want, 5 * rounding_gate(spec.dtype));
  }
  void expect_identical(const Spec& spec, const Forward& a, const Forward& b) const {
    EXPECT_TRUE(identical(a.o, b.o)) << "o, " << spec.text();
    EXPECT_TRUE(identical(a.saved, b.saved)) << "saved, " << spec.text();
    EXPECT_EQ(a.info.iterations, b.info.iterations) << spec.text();
    EXPECT_EQ(a.info.residual, b.info.residual) << spec.text();
    EXPECT_EQ(a.info.status, b.info.status) << spec.text();
  }
  void expect_identical(const Spec& spec, const Backward& a, const Backward& b) const {
    EXPECT_TRUE(identical(a.dq, b.dq)) << "dq, " << spec.text();
    EXPECT_TRUE(identical(a.dk, b.dk)) << "dk, " << spec.text();
    EXPECT_TRUE(identical(a.dv, b.dv)) << "dv, " << spec.text();
    EXPECT_TRUE(identical(a.dridge, b.dridge)) << "dridge, " << spec.text();
    EXPECT_TRUE(identical(a.dx, b.dx)) << "dx, " << spec.text();
  }
};
LLA_EACH_IMPLEMENTATION(Invariance);

// Types and solvers worth repeating a property for.
std::vector<Spec> variants(const Spec& base) {
  std::vector<Spec> result;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const int solver : {LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT}) {
      Spec spec = base;
      spec.dtype = dtype;
      spec.options.solver = solver;
      spec.options.tolerance = tight_tolerance(dtype);
      result.push_back(spec);
    }
  }
  return result;
}

// Elements [begin, end) of the batch (or of the positions, when packed); `step` is the number of elements per entry.
std::vector<double> slice(const std::vector<double>& t, int64_t begin, int64_t end, int64_t step) {
  return {t.begin() + begin * step, t.begin() + end * step};
}

TEST_P(Invariance, OrderOfKeys) {
  Spec base = self_attention(75, 12, 2);
  base.length_q = 40;
  base.options.causal = 0;
  for (const Spec& spec : variants(base)) {
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::mean, 0.5, 1);
    std::vector<int64_t> order(75);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = 75; i-- > 1;)
      std::swap(order[i], order[static_cast<size_t>(data::uniform(3, 0, i) * static_cast<double>(i + 1))]);
    const auto permuted = [&](const std::vector<double>& t) {
      std::vector<double> result;
      for (const int64_t j : order) result.insert(result.end(), t.begin() + j * 24, t.begin() + (j + 1) * 24);
      return result;
    };
    Inputs shuffled = inputs;
    shuffled.k = permuted(inputs.k);
    shuffled.v = permuted(inputs.v);
    expect_same(spec, forward(spec, shuffled), forward(spec, inputs));
    Backward want = backward(spec, inputs);
    want.dk = permuted(want.dk);
    want.dv = permuted(want.dv);
    expect_same(spec, backward(spec, shuffled), want);
  }
}

TEST_P(Invariance, SplittingTheBatch) {
  Spec base = self_attention(70, 8, 2, 3);
  base.ridge = RidgeShape::token;
  for (const Spec& spec : variants(base)) {
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 2);
    const Forward whole = forward(spec, inputs);
    const Backward whole_gradients = backward(spec, inputs);
    Spec one = spec;
    one.batch = 1;
    for (int64_t b = 0; b < 3; ++b) {
      const auto part = [&](const std::vector<double>& t) {
        return slice(t, b, b + 1, static_cast<int64_t>(t.size()) / 3);
      };
      Inputs in{part(inputs.q), part(inputs.k), part(inputs.v), part(inputs.ridge), {}, part(inputs.grad_o)};
      Forward want;
      want.o = part(whole.o);
      expect_same(one, forward(one, in), want);
      Backward want_gradients;
      want_gradients.dq = part(whole_gradients.dq);
      want_gradients.dk = part(whole_gradients.dk);
      want_gradients.dv = part(whole_gradients.dv);
      want_gradients.dridge = part(whole_gradients.dridge);
      expect_same(one, backward(one, in), want_gradients);
    }
  }
}

// A packed batch against each of its sequences alone.
TEST_P(Invariance, Packing) {
  Spec base = self_attention(200, 8, 2);
  base.length_k = 210;
  base.heads_kv = 1;
  base.ridge = RidgeShape::dimension;
  base.cu_q = {0, 1, 64, 64, 131, 200};
  base.cu_k = {0, 3, 66, 70, 141, 210};
  for (const int causal : {1, 0}) {
    base.options.causal = causal;
    base.options.window_left = causal ? -1 : 17;
    for (const Spec& spec : variants(base)) {
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 3);
      const Forward whole = forward(spec, inputs);
      const Backward whole_gradients = backward(spec, inputs);
      for (size_t s = 0; s + 1 < spec.cu_q.size(); ++s) {
        Spec one = spec;
        one.cu_q.clear();
        one.cu_k.clear();
        one.length_q = spec.cu_q[s + 1] - spec.cu_q[s];
        one.length_k = spec.cu_k[s + 1] - spec.cu_k[s];
        const auto rows = [&](const std::vector<double>& t) { return slice(t, spec.cu_q[s], spec.cu_q[s + 1], 2 * 8); };
        const auto keys = [&](const std::vector<double>& t) { return slice(t, spec.cu_k[s], spec.cu_k[s + 1], 8); };
        Inputs in{rows(inputs.q), keys(inputs.k), keys(inputs.v), rows(inputs.ridge), {}, rows(inputs.grad_o)};
        Forward want;
        want.o = rows(whole.o);
        expect_same(one, forward(one, in), want);
        Backward want_gradients;
        want_gradients.dq = rows(whole_gradients.dq);
        want_gradients.dk = keys(whole_gradients.dk);
        want_gradients.dv = keys(whole_gradients.dv);
        want_gradients.dridge = rows(whole_gradients.dridge);
        expect_same(one, backward(one, in), want_gradients);
      }
    }
  }
}

TEST_P(Invariance, Strides) {
  Spec base = self_attention(70, 12, 4, 2);
  base.heads_kv = 2;
  base.value_dim = 7;
  for (const RidgeShape ridge : {RidgeShape::head, RidgeShape::token, RidgeShape::dimension, RidgeShape::none}) {
    base.ridge = ridge;
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      Spec spec = base;
      spec.dtype = dtype;
      spec.options.tolerance = tight_tolerance(dtype);
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 4);
      const Forward want = forward(spec, inputs);
      const Backward want_gradients = backward(spec, inputs);
      for (const Layout layout : {Layout::head_major, Layout::padded, Layout::scattered}) {
        spec.layout = layout;
        if (!takes(spec)) continue;
        expect_same(spec, forward(spec, inputs), want);
        expect_same(spec, backward(spec, inputs), want_gradients);
      }
    }
  }
}

// Sharing keys between query heads against copies of them.
TEST_P(Invariance, GroupedHeads) {
  Spec base = self_attention(66, 8, 6);
  base.heads_kv = 2;
  base.ridge = RidgeShape::head;
  for (const Spec& spec : variants(base)) {
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 5);
    Spec copied = spec;
    copied.heads_kv = 6;
    const auto copies = [&](const std::vector<double>& t) {
      std::vector<double> result;
      for (int64_t at = 0; at < static_cast<int64_t>(t.size()); at += 8) {
        for (int g = 0; g < 3; ++g) result.insert(result.end(), t.begin() + at, t.begin() + at + 8);
      }
      return result;
    };
    Inputs in = inputs;
    in.k = copies(inputs.k);
    in.v = copies(inputs.v);
    expect_same(spec, forward(spec, inputs), forward(copied, in));
    if (spec.dtype == DType::bf16) continue;  // sums of rounded gradients are not the rounded sum
    Backward want = backward(copied, in);
    const auto summed = [&](const std::vector<double>& t) {
      std::vector<double> result(t.size() / 3, 0.0);
      for (size_t i = 0; i < t.size(); ++i) result[i / 24 * 8 + i % 8] += t[i];
      return result;
    };
    want.dk = summed(want.dk);
    want.dv = summed(want.dv);
    expect_same(spec, backward(spec, inputs), want);
  }
}

// Queries in chunks, each against the keys up to its end, as a prefill in pieces does; down to one query (decode).
TEST_P(Invariance, ChunkedQueries) {
  Spec base = self_attention(150, 8, 2);
  base.ridge = RidgeShape::token;
  for (const int64_t window : {-1, 20}) {
    base.options.window_left = window;
    for (const Spec& spec : variants(base)) {
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 6);
      const Forward whole = forward(spec, inputs);
      const std::vector<int64_t> bounds = {0, 64, 130, 149, 150};
      for (size_t c = 0; c + 1 < bounds.size(); ++c) {
        Spec chunk = spec;
        chunk.length_q = bounds[c + 1] - bounds[c];
        chunk.length_k = bounds[c + 1];
        const auto rows = [&](const std::vector<double>& t, int64_t step) {
          return slice(t, bounds[c], bounds[c + 1], step);
        };
        Inputs in{rows(inputs.q, 16),
                  slice(inputs.k, 0, bounds[c + 1], 16),
                  slice(inputs.v, 0, bounds[c + 1], 16),
                  rows(inputs.ridge, 2),
                  {},
                  rows(inputs.grad_o, 16)};
        Forward want;
        want.o = rows(whole.o, 16);
        expect_same(chunk, forward(chunk, in), want);
      }
    }
  }
}

TEST_P(Invariance, RidgeShapes) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    Spec spec = self_attention(70, 8, 2, 2);
    spec.dtype = dtype;
    spec.options.tolerance = tight_tolerance(dtype);
    if (!takes(spec)) continue;
    Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 7);
    const Forward want = forward(spec, inputs);
    const Backward want_gradients = backward(spec, inputs);
    for (const RidgeShape ridge : {RidgeShape::head, RidgeShape::token, RidgeShape::dimension}) {
      spec.ridge = ridge;
      inputs.ridge = std::vector<double>(ridge == RidgeShape::head ? 2 : ridge == RidgeShape::token ? 280 : 2240, 0.5);
      expect_same(spec, forward(spec, inputs), want);
      const Backward gradients = backward(spec, inputs);
      const double sum = std::accumulate(gradients.dridge.begin(), gradients.dridge.end(), 0.0);
      EXPECT_NEAR(sum / want_gradients.dridge[0], 1, 100 * rounding_gate(dtype)) << spec.text();
      Backward rest = gradients;
      rest.dridge = want_gradients.dridge;
      expect_same(spec, rest, want_gradients);
    }
  }
}

TEST_P(Invariance, WeightsCachedOrRecomputed) {
  if (GetParam() == "reference") GTEST_SKIP() << "keeps no weights";
  for (const Spec& variant : variants(self_attention(200, 64, 2))) {
    Spec spec = variant;
    spec.options.weights = LLA_WEIGHTS_RECOMPUTE;
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 8);
    const Forward want = forward(spec, inputs);
    const Backward want_gradients = backward(spec, inputs);
    spec.options.weights = LLA_WEIGHTS_CACHED;
    if (!takes(spec)) continue;
    expect_same(spec, forward(spec, inputs), want);
    expect_same(spec, backward(spec, inputs), want_gradients);
  }
}

TEST_P(Invariance, SameBitsEveryTime) {
  for (const Spec& spec : variants(self_attention(140, 64, 2))) {
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::self, 0.1, 9);
    expect_identical(spec, forward(spec, inputs), forward(spec, inputs));
    expect_identical(spec, backward(spec, inputs), backward(spec, inputs));
  }
}

TEST_P(Invariance, SameBitsWhateverTheNumberOfThreads) {
  if (GetParam() == "reference") GTEST_SKIP() << "has one thread";
  Spec one_head = self_attention(reduced() ? 150 : 400, 64);
  Spec heads = self_attention(130, 16, 3, 2);
  heads.heads_kv = 1;
  Spec packed = self_attention(200, 8, 2);
  packed.cu_q = packed.cu_k = {0, 70, 71, 200};
  for (const Spec& base : {one_head, heads, packed}) {
    for (const Spec& spec : variants(base)) {
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 10);
      ASSERT_EQ(lla_set_num_threads(1), LLA_OK);
      const Forward want = forward(spec, inputs);
      const Backward want_gradients = backward(spec, inputs);
      for (const int threads : {2, 3, 5}) {
        ASSERT_EQ(lla_set_num_threads(threads), LLA_OK);
        ASSERT_EQ(lla_get_num_threads(), threads);
        expect_identical(spec, forward(spec, inputs), want);
        expect_identical(spec, backward(spec, inputs), want_gradients);
      }
      ASSERT_EQ(lla_set_num_threads(0), LLA_OK);
    }
  }
}

// Optional outputs left out must not change the others.
TEST_P(Invariance, OptionalOutputsAreOptional) {
  for (const RidgeShape ridge : {RidgeShape::head, RidgeShape::none}) {
    Spec spec = self_attention(70, 8, 2);
    spec.ridge = ridge;
    if (!takes(spec)) continue;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 11);
    const Forward full = forward(spec, inputs);
    EXPECT_TRUE(identical(run_forward(spec, inputs, GetParam(), {.saved = false, .info = false}).o, full.o));
    EXPECT_TRUE(identical(run_forward(spec, inputs, GetParam(), {.saved = true, .info = false}).saved, full.saved));
    const Backward want = backward(spec, inputs);
    for (int mask = 0; mask < 16; ++mask) {
      const WantGradients wanted{(mask & 1) != 0, (mask & 2) != 0, (mask & 4) != 0, (mask & 8) != 0, mask % 3 == 0};
      const Backward got = run_backward(spec, inputs, full.saved, GetParam(), wanted);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      if (wanted.q) {
        EXPECT_LE(relative_error(got.dq, want.dq), 1e-6);
      }
      if (wanted.k) {
        EXPECT_LE(relative_error(got.dk, want.dk), 1e-6);
      }
      if (wanted.v) {
        EXPECT_LE(relative_error(got.dv, want.dv), 1e-6);
      }
      if (wanted.ridge_or_x) {
        EXPECT_LE(relative_error(got.dridge, want.dridge) + relative_error(got.dx, want.dx), 1e-6);
      }
    }
  }
}

// 16-bit inputs with f32 outputs: the same numbers before their last rounding.
TEST_P(Invariance, FloatOutputsOfHalfInputs) {
  constexpr double kFewRoundedTwice = 1e-4;  // fp64 code rounds once to the short type, and twice by way of f32
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      Spec spec = self_attention(70, 8, 2);
      spec.dtype = dtype;
      spec.ridge = ridge;
      spec.options.tolerance = tight_tolerance(dtype);
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 12);
      const Forward narrow = forward(spec, inputs);
      const Backward narrow_gradients = backward(spec, inputs);
      spec.out_dtype = DType::f32;
      const Forward wide = forward(spec, inputs);
      const Backward wide_gradients = backward(spec, inputs);
      EXPECT_GT(relative_error(rounded(wide.o, dtype), wide.o), 1e-5) << "not wide, " << spec.text();
      EXPECT_LE(relative_error(rounded(wide.o, dtype), narrow.o), kFewRoundedTwice) << spec.text();
      EXPECT_LE(relative_error(rounded(wide_gradients.dq, dtype), narrow_gradients.dq), kFewRoundedTwice)
          << spec.text();
      EXPECT_LE(relative_error(rounded(wide_gradients.dk, dtype), narrow_gradients.dk), kFewRoundedTwice)
          << spec.text();
      EXPECT_LE(relative_error(rounded(wide_gradients.dv, dtype), narrow_gradients.dv), kFewRoundedTwice)
          << spec.text();
      expect_output(spec, wide.o, oracle_forward(spec, inputs).o, accuracy_gates(DType::f32, 0.1).output);
      expect_gradients(spec, wide_gradients, oracle_backward(spec, inputs), accuracy_gates(DType::f32, 0.1).gradient);
    }
  }
}

// options.batch_invariant: a sequence's bits are its own, dense and packed (equal bounds).
TEST_P(Invariance, BatchInvariantBits) {
  for (const bool packed : {false, true}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      Spec all = self_attention(40, 64, 2, 3);
      all.ridge = ridge;
      all.options.batch_invariant = 1;
      Spec one = all;
      one.batch = 1;
      if (packed) {
        all.batch = 1, all.length_q = all.length_k = 120;
        all.cu_q = all.cu_k = {0, 40, 80, 120};
        one.cu_q = one.cu_k = {0, 40};
      }
      if (!takes(all)) continue;
      Inputs inputs = make_inputs(all, data::Kind::randn, 0.5, 11);
      // One sequence's keys much larger than another's: shared statistics would show.
      for (size_t i = 0; i < inputs.k.size() / 3; ++i) inputs.k[i] *= 8;
      const std::vector<double> together = forward(all, inputs).o;
      for (int64_t b = 0; b < 3; ++b) {
        const auto part = [&](const std::vector<double>& t) {
          const auto n = static_cast<int64_t>(t.size() / 3);
          return std::vector<double>(t.begin() + b * n, t.begin() + (b + 1) * n);
        };
        const Inputs alone{part(inputs.q),     part(inputs.k), part(inputs.v),
                           part(inputs.ridge), part(inputs.x), part(inputs.grad_o)};
        EXPECT_TRUE(identical(forward(one, alone).o, part(together))) << all.text() << ", sequence " << b;
      }
    }
  }
}

}  // namespace
}  // namespace lla::test
