// Random problems against the oracle. A failure prints the line that repeats it:
//     LLA_FUZZ_SEED=<seed> fuzz_test
// LLA_FUZZ_SECONDS bounds the time (default 20), LLA_FUZZ_START the first of the seeds tried.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "core/text.hpp"
#include "support/cache.hpp"
#include "support/conditioned.hpp"
#include "support/gates.hpp"
#include "support/truth.hpp"

namespace lla::test {
namespace {

// Draws from a stream of its own: the n-th draw of a seed never changes because of an earlier branch.
class Dice {
 public:
  explicit Dice(uint64_t seed) : seed_(seed) {}
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(data::uniform(seed_, 77, next_++) * static_cast<double>(high - low + 1));
  }
  bool one_in(int64_t n) { return between(1, n) == 1; }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }

 private:
  uint64_t seed_;
  uint64_t next_ = 0;
};

struct FuzzCase {
  Spec spec;
  data::Kind kind;
  double ridge;
  bool degenerate = false;  // the kind
  int gradient_power = 0;   // gradients times 2^this
};

std::vector<int32_t> random_bounds(Dice& dice, int64_t total, int64_t sequences) {
  std::vector<int32_t> bounds = {0, static_cast<int32_t>(total)};
  for (int64_t i = 1; i < sequences; ++i) bounds.push_back(static_cast<int32_t>(dice.between(0, total)));
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

FuzzCase make_case(uint64_t seed) {
  Dice dice(seed);
  FuzzCase c;
  Spec& s = c.spec;
  s.dtype = dice.pick({DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16});
  s.out_dtype = dice.one_in(3) && s.dtype != DType::f64 ? DType::f32 : DType::none;
  s.dim = dice.one_in(4) ? dice.pick<int64_t>({1, 64, 80, 128}) : dice.between(1, 40);
  s.value_dim = dice.one_in(2) ? s.dim : dice.between(1, 70);
  s.heads_kv = dice.between(1, 3);
  s.heads_q = s.heads_kv * dice.between(1, 3);
  const int64_t longest = s.dim > 40 ? 90 : 200;
  s.length_k = dice.one_in(20) ? 0 : dice.between(1, longest);
  s.length_q = dice.one_in(2) ? s.length_k : dice.one_in(20) ? 0 : dice.between(1, longest);
  s.batch = dice.one_in(30) ? 0 : dice.between(1, 2);
  if (dice.one_in(3)) {
    s.batch = 1;
    const int64_t sequences = dice.between(1, 5);
    s.cu_q = random_bounds(dice, s.length_q, sequences);
    s.cu_k = random_bounds(dice, s.length_k, sequences);
  }
  s.ridge =
      dice.pick({RidgeShape::none, RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension});
  s.layout = dice.pick({Layout::dense, Layout::dense, Layout::head_major, Layout::padded, Layout::scattered});
  s.options.causal = dice.one_in(2) ? 1 : 0;
  if (dice.one_in(3)) s.options.window_left = dice.between(0, 70);
  if (dice.one_in(3)) s.options.window_right = dice.between(0, 70);
  if (dice.one_in(4)) s.options.scale = 0.05 * static_cast<double>(dice.between(0, 10));
  s.options.solver =
      static_cast<int32_t>(dice.pick({LLA_SOLVER_AUTO, LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT}));
  s.options.weights = static_cast<int32_t>(dice.pick({LLA_WEIGHTS_AUTO, LLA_WEIGHTS_RECOMPUTE, LLA_WEIGHTS_CACHED}));
  s.options.tolerance = tight_tolerance(s.dtype);
  s.options.max_iterations = static_cast<int32_t>(20 * s.dim + 200);
  c.kind = data::kinds[dice.between(0, 5)];
  c.ridge = dice.pick({10.0, 1.0, 0.1, 0.01});
  c.degenerate = dice.one_in(3);
  if (c.degenerate) {
    c.kind = data::degenerate_kinds[dice.between(0, std::size(data::degenerate_kinds) - 1)];
    c.gradient_power = static_cast<int>(s.dtype == DType::f16 ? dice.between(-6, 10) : dice.between(-100, 13));
  } else if (dice.one_in(4)) {  // trained attention, judged in the same way
    c.kind = data::peaked_kinds[dice.between(0, std::size(data::peaked_kinds) - 1)];
    c.degenerate = true;
  }
  return c;
}

double longest_row(const std::vector<double>& rows, int64_t width) {
  double largest = 0;
  for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(width)) {
    double squares = 0;
    for (size_t d = at; d < at + static_cast<size_t>(width); ++d) squares += rows[d] * rows[d];
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest);
}

// Of every head of every batch entry the rms length of its outputs: the smallest that is not zero.
double smallest_output(const Spec& spec, const std::vector<double>& o) {
  if (o.empty()) return std::numeric_limits<double>::infinity();
  const int64_t groups = spec.batch * spec.heads_q, of_batch = static_cast<int64_t>(o.size()) / spec.batch;
  std::vector<double> squares(static_cast<size_t>(groups));
  for (size_t i = 0; i < o.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i), head = at / spec.value_dim % spec.heads_q;
    squares[static_cast<size_t>(at / of_batch * spec.heads_q + head)] += o[i] * o[i];
  }
  double smallest = std::numeric_limits<double>::infinity();
  for (const double sum : squares) {
    if (sum > 0) smallest = std::min(smallest, std::sqrt(sum / static_cast<double>(spec.length_q)));
  }
  return smallest;
}

// The fuzzer looks for wrong code, not for the last bit: gates for known kinds and sizes are the accuracy test's. Few
// keys far from a query with a small ridge make x long, and rounding k.x costs |k| |x| units of precision whatever the
// code does. Outputs that nearly cancel, as those of values that follow the keys do where the query is near the origin,
// are as exact as the values they are made of.
Gates fuzz_gates(const FuzzCase& c, const Inputs& inputs, const Forward& oracle) {
  constexpr double kSlack = 5;
  const double epsilon = c.spec.dtype == DType::f64 ? 0x1p-52 : 0x1p-23;
  const double rounding =
      epsilon * longest_row(saved_x(c.spec, oracle.saved), c.spec.dim) * longest_row(inputs.k, c.spec.dim);
  const double cancelled = epsilon * longest_row(inputs.v, c.spec.value_dim) / smallest_output(c.spec, oracle.o);
  const Gates gates = accuracy_gates(c.spec.dtype, c.ridge);
  return {kSlack * gates.output + 4 * rounding + 4 * cancelled, kSlack * gates.gradient + 20 * rounding};
}

// What gradients in q and k are sums of.
double gradient_summands(const Spec& spec, const Inputs& inputs, const Forward& oracle) {
  const double s = std::isnan(spec.options.scale) ? 1 / std::sqrt(static_cast<double>(spec.dim)) : spec.options.scale;
  const double reach = longest_row(saved_x(spec, oracle.saved), spec.dim) + s * longest_row(inputs.q, spec.dim);
  return longest_row(inputs.grad_o, spec.value_dim) * longest_row(inputs.v, spec.value_dim) * reach;
}

// Where every row has one key with all the weight, the gradients in q and k are differences of nearly equal numbers:
// little of them is left.
bool gradients_vanish(const FuzzCase& c, const Inputs& inputs, const Forward& oracle, const Backward& want) {
  return longest_row(want.dk, c.spec.dim) < 1e-4 * gradient_summands(c.spec, inputs, oracle);
}

// Repeated, zero, or of very different sizes: everything is finite, and right as far as the truth itself stands still;
// where rows report no solution, finite is all.
void run_degenerate_case(const FuzzCase& c, uint64_t seed) {
  Spec spec = c.spec;
  if (spec.dtype == DType::f16) spec.out_dtype = DType::f32;
  Inputs inputs = make_inputs(spec, c.kind, c.ridge, seed);
  for (double& g : inputs.grad_o) g = rounded(std::ldexp(g, c.gradient_power), spec.dtype);
  const Truth truth(spec, inputs);
  const Gates known = accuracy_gates(spec.dtype, 0.01);
  const bool large_keys = c.kind == data::Kind::long_keys || c.kind == data::Kind::one_large_key;
  const double slack = large_keys ? 20 : 5;  // against these keys the ridge is 1e-4 of what it says
  // Sums of differences that were corrected for their own rounding have twice the digits of their type, no more.
  const double epsilon = spec.dtype == DType::f64 ? 0x1p-52 : 0x1p-23;
  const double long_products =
      longest_row(saved_x(spec, truth.forward.saved), spec.dim) * longest_row(inputs.k, spec.dim);
  const double floor = 16 * epsilon * epsilon * gradient_summands(spec, inputs, truth.forward);
  const double floor_of_dx = 16 * epsilon * epsilon * longest_row(inputs.grad_o, spec.value_dim) *
                             longest_row(inputs.v, spec.value_dim) * longest_row(inputs.k, spec.dim);
  for (const std::string& name : implementations_under_test()) {
    if (!takes(name, spec)) continue;
    SCOPED_TRACE(name);
    const Forward got = run_forward(spec, inputs, name);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    const Backward gradients = run_backward(spec, inputs, got.saved, name);
    ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
    const Backward &want = truth.backward, &moved = truth.moved_backward;
    // The reference hands x on in the type's precision and does not say where that shows, nor where a residual does not
    // say much of x: a ridge of 1e-6 of the keys' variance.
    const bool plain = name == "reference";
    bool solved = !plain || (epsilon * long_products < 1e-3 && !(large_keys && spec.options.solver == LLA_SOLVER_CG));
    for (const RowInfo* info : {&got.info, &gradients.info}) {
      for (const int status : info->status) solved &= status == LLA_ROW_OK;
    }
    const auto check = [&](const Checked& checked, double gate, double floor = 0) {
      expect_finite(checked);
      if (solved && !testing::Test::HasFailure()) expect_close(checked, gate, floor);
    };
    check({"o", got.o, truth.forward.o, truth.moved.o, spec.output()}, slack * known.output);
    check({"dq", gradients.dq, want.dq, moved.dq, spec.output()}, slack * known.gradient, floor);
    check({"dk", gradients.dk, want.dk, moved.dk, spec.output()}, slack * known.gradient, floor);
    check({"dv", gradients.dv, want.dv, moved.dv, spec.output()}, slack * known.gradient);
    check({"dx", gradients.dx, want.dx, moved.dx, spec.output()}, slack * known.gradient, floor_of_dx);
    if (spec.ridge == RidgeShape::token || spec.ridge == RidgeShape::dimension) {
      check({"dridge", gradients.dridge, want.dridge, moved.dridge, spec.ridge_dtype()}, slack * known.gradient);
    }
  }
}

void run_case(uint64_t seed) {
  const FuzzCase c = make_case(seed);
  Spec backward_spec = c.spec;  // gradients of peaked rows can be below all that f16 holds
  if (c.spec.dtype == DType::f16) backward_spec.out_dtype = DType::f32;
  SCOPED_TRACE(core::cat("repeat with: LLA_FUZZ_SEED=", seed, " fuzz_test    (", data::name(c.kind), ", ridge ",
                         c.ridge, ", gradients 2^", c.gradient_power, ", ", c.spec.text(), ")"));
  if (c.degenerate) return run_degenerate_case(c, seed);
  const Inputs inputs = make_inputs(c.spec, c.kind, c.ridge, seed);
  const Forward want = oracle_forward(c.spec, inputs);
  const Backward want_gradients = oracle_backward(c.spec, inputs);
  const Gates gates = fuzz_gates(c, inputs, want);
  for (const std::string& name : implementations_under_test()) {
    if (!takes(name, c.spec)) continue;
    SCOPED_TRACE(name);
    const Forward got = run_forward(c.spec, inputs, name);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    expect_output(c.spec, got.o, want.o, gates.output);
    const Backward gradients = run_backward(backward_spec, inputs, got.saved, name);
    ASSERT_EQ(gradients.status, LLA_OK) << gradients.message;
    if (gradients_vanish(c, inputs, want, want_gradients)) continue;
    expect_gradients(backward_spec, gradients, want_gradients, gates.gradient);
  }
}

// Sequences of any lengths and rows in a cache of any layout; what no row may see is NaN.
CacheSpec make_cache_case(Dice& dice) {
  CacheSpec s;
  s.dtype = dice.pick({DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16});
  if (s.dtype != DType::f64) s.out_dtype = DType::f32;
  s.dim = dice.one_in(4) ? dice.pick<int64_t>({1, 64, 80, 128}) : dice.between(1, 40);
  s.value_dim = dice.one_in(2) ? s.dim : dice.between(1, 70);
  s.heads_kv = dice.between(1, 3);
  s.heads_q = s.heads_kv * dice.between(1, 5);
  s.packed = dice.one_in(2);
  const int64_t longest = dice.one_in(8) ? 3000 : 200, rows = dice.one_in(3) ? 1 : dice.between(1, 100);
  s.sequences.clear();
  for (int64_t b = dice.between(1, 5); b > 0; --b) {
    CachedSequence q;
    q.rows = !s.packed ? rows : dice.one_in(8) ? 0 : dice.one_in(2) ? 1 : dice.between(1, rows);
    q.keys = std::max(q.rows, dice.one_in(10) ? 0 : dice.between(1, longest));
    q.first_key = dice.one_in(4) ? dice.between(0, q.keys) : 0;
    s.sequences.push_back(q);
  }
  s.page_size = dice.one_in(3) ? 0 : dice.pick<int64_t>({1, 2, 7, 16, 64, 256});
  s.order = dice.pick({PageOrder::forward, PageOrder::reversed, PageOrder::shuffled});
  s.ridge =
      dice.pick({RidgeShape::none, RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension});
  s.layout = dice.pick({Layout::dense, Layout::dense, Layout::head_major, Layout::padded, Layout::scattered});
  s.options.causal = dice.one_in(3) ? 0 : 1;
  if (dice.one_in(3)) s.options.window_left = dice.between(0, 70);
  s.options.solver =
      static_cast<int32_t>(dice.pick({LLA_SOLVER_AUTO, LLA_SOLVER_AUTO, LLA_SOLVER_CG, LLA_SOLVER_DIRECT}));
  s.options.tolerance = tight_tolerance(s.dtype);
  s.options.max_iterations = static_cast<int32_t>(20 * s.dim + 200);
  if (dice.one_in(3)) {
    for (const CachedSequence& q : s.sequences) s.max_total_k += q.keys;
  }
  if (dice.one_in(2)) s.dim = (s.dim + 7) / 8 * 8, s.value_dim = (s.value_dim + 7) / 8 * 8;  // what tensor cores take
  s.options.batch_invariant = dice.one_in(3);
  return s;
}

// The same sequences in the other order: under batch_invariant nobody's bits change.
void expect_the_same_bits_backwards(const CacheSpec& spec, const std::vector<Inputs>& inputs, const CacheForward& want,
                                    const std::string& implementation) {
  CacheSpec backwards = spec;
  std::reverse(backwards.sequences.begin(), backwards.sequences.end());
  const CacheForward got = run_cache(backwards, {inputs.rbegin(), inputs.rend()}, implementation);
  ASSERT_EQ(got.status, LLA_OK) << got.message;
  const size_t last = inputs.size() - 1;
  for (size_t b = 0; b <= last; ++b) EXPECT_TRUE(identical(got.o[last - b], want.o[b])) << "sequence " << b;
}

void run_cache_case(uint64_t seed) {
  Dice dice(seed);
  const data::Kind kind = data::kinds[dice.between(0, 5)];
  const double ridge = dice.pick({10.0, 1.0, 0.1});
  const CacheSpec spec = make_cache_case(dice);
  SCOPED_TRACE(core::cat("repeat with: LLA_FUZZ_SEED=", seed, " fuzz_test --gtest_filter='*Caches'    (",
                         data::name(kind), ", ridge ", ridge, ", ", spec.text(), ")"));
  const std::vector<Inputs> inputs = make_cache_inputs(spec, kind, ridge, seed);
  const CacheForward want = cache_oracle(spec, inputs);
  // As in fuzz_gates; |k| |x| is at most some thousands with such a ridge.
  const double gate = 5 * accuracy_gates(spec.dtype, ridge).output + (spec.dtype == DType::f64 ? 1e-11 : 1e-3);
  for (const std::string& name : implementations_under_test()) {
    if (!takes_cache(name, spec)) continue;
    SCOPED_TRACE(name);
    const CacheForward got = run_cache(spec, inputs, name);
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (size_t b = 0; b < got.o.size(); ++b) {
      EXPECT_LE(relative_error(got.o[b], want.o[b]), gate) << "sequence " << b;
      for (const int status : got.row_status[b]) EXPECT_NE(status, LLA_ROW_NAN) << "sequence " << b;
    }
    if (spec.options.batch_invariant) expect_the_same_bits_backwards(spec, inputs, got, name);
  }
}

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtoull(value, nullptr, 10) : otherwise;
}

void fuzz(void (*run)(uint64_t seed), uint64_t seconds) {
  if (std::getenv("LLA_FUZZ_SEED")) return run(from_environment("LLA_FUZZ_SEED", 0));
  const auto start = std::chrono::steady_clock::now();
  const std::chrono::seconds limit(from_environment("LLA_FUZZ_SECONDS", seconds));
  const uint64_t first = from_environment("LLA_FUZZ_START", 1);
  uint64_t seed = first;
  constexpr uint64_t kLeast = 10;  // cases on however slow a machine or build
  for (; seed < first + kLeast || std::chrono::steady_clock::now() - start < limit; ++seed) {
    run(seed);
    if (testing::Test::HasFailure()) break;  // one case at a time
  }
  testing::Test::RecordProperty("cases", static_cast<int>(seed - first));
}

TEST(Fuzz, RandomProblems) { fuzz(run_case, reduced() ? 10 : 20); }
TEST(Fuzz, RandomCaches) { fuzz(run_cache_case, reduced() ? 5 : 10); }

}  // namespace
}  // namespace lla::test
