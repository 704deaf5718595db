// Legal calls that something about memory could spoil: rows behind the last packed sequence, windows of any size,
// tensors side by side in one buffer, threads that change between the question about memory and the call.
#include <fenv.h>  // feenableexcept
#include <gtest/gtest.h>
#include <pthread.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "support/gates.hpp"

namespace lla::test {
namespace {

class Faults : public EachImplementation {};
LLA_EACH_IMPLEMENTATION(Faults);

constexpr int64_t kLongest = std::numeric_limits<int64_t>::max();

// ---- rows behind the last sequence ---------------------------------------------------------------------------------

// The first `rows` of a packed tensor.
std::vector<double> head_of(const std::vector<double>& tensor, int64_t rows, int64_t of) {
  return {tensor.begin(), tensor.begin() + static_cast<int64_t>(tensor.size()) / of * rows};
}
bool zero_behind(const std::vector<double>& tensor, int64_t rows, int64_t of) {
  return std::all_of(tensor.begin() + static_cast<int64_t>(tensor.size()) / of * rows, tensor.end(),
                     [](double x) { return x == 0 && !std::signbit(x); });
}
// Of the information on rows and of `saved`'s sections, which are (Hq, total_q, channels).
template <class T>
std::vector<double> by_position(const std::vector<T>& section, int64_t heads, int64_t total, int64_t channels = 1) {
  std::vector<double> out(section.size());
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < total; ++i) {
      for (int64_t c = 0; c < channels; ++c)
        out[static_cast<size_t>((i * heads + h) * channels + c)] =
            static_cast<double>(section[static_cast<size_t>((h * total + i) * channels + c)]);
    }
  }
  return out;
}

// Everything a call writes: those rows zero, the others as if the tensors ended with the last sequence. What the inputs
// hold there must not matter; one large number would spoil a scale, NaN a sum.
TEST_P(Faults, RowsBehindTheLastSequenceAreZeroAndNeverRead) {
  constexpr int64_t kQueries = 70, kKeys = 90, kPaddedQueries = 133, kPaddedKeys = 97;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    if (reduced() && dtype != DType::f32) continue;
    for (const RidgeShape ridge :
         {RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension, RidgeShape::none}) {
      Spec exact = self_attention(kQueries, 8, 4);
      exact.length_k = kKeys;
      exact.heads_kv = 2;
      exact.value_dim = 16;
      exact.dtype = dtype;
      exact.ridge = ridge;
      exact.layout = ridge == RidgeShape::token ? Layout::padded : Layout::dense;
      exact.cu_q = {0, 20, 20, kQueries};
      exact.cu_k = {0, 40, 50, kKeys};
      Spec longer = exact;
      longer.length_q = kPaddedQueries;
      longer.length_k = kPaddedKeys;
      if (!takes(exact) || !takes(longer)) continue;
      const Inputs inputs = make_inputs(exact, data::Kind::randn, 0.5, 7);
      for (const double rest : {1e30, std::nan("")}) {
        Inputs more = inputs;
        const auto grow = [&](std::vector<double>& tensor, int64_t from, int64_t to) {
          tensor.resize(tensor.size() / static_cast<size_t>(from) * static_cast<size_t>(to), rest);
        };
        for (auto* t : {&more.q, &more.grad_o, &more.x}) grow(*t, kQueries, kPaddedQueries);
        for (auto* t : {&more.k, &more.v}) grow(*t, kKeys, kPaddedKeys);
        const bool by_token = ridge == RidgeShape::token || ridge == RidgeShape::dimension;
        if (by_token) grow(more.ridge, kQueries, kPaddedQueries);
        const auto expect = [&](const char* name, const std::vector<double>& got, const std::vector<double>& want,
                                int64_t rows, int64_t of) {
          EXPECT_TRUE(zero_behind(got, rows, of)) << name << " behind the last sequence, " << longer.text();
          EXPECT_TRUE(identical(head_of(got, rows, of), want)) << name << ", " << longer.text();
        };
        const auto expect_info = [&](const RowInfo& got, const RowInfo& want) {
          const auto both = [&](const char* name, const auto& a, const auto& b) {
            expect(name, by_position(a, 4, kPaddedQueries), by_position(b, 4, kQueries), kQueries, kPaddedQueries);
          };
          both("iterations", got.iterations, want.iterations);
          both("residual", got.residual, want.residual);
          both("row_status", got.status, want.status);
        };
        const Forward want = forward(exact, inputs), got = forward(longer, more);
        expect("o", got.o, want.o, kQueries, kPaddedQueries);
        expect_info(got.info, want.info);
        const auto expect_section = [&](int64_t lla_forward_sizes::*offset, int64_t channels) {
          const auto section = [&](const Forward& of, int64_t total) {
            const auto first = of.saved.begin() + of.sizes.*offset;
            return by_position(std::vector<double>(first, first + 4 * total * channels), 4, total, channels);
          };
          expect("saved", section(got, kPaddedQueries), section(want, kQueries), kQueries, kPaddedQueries);
        };
        expect_section(&lla_forward_sizes::saved_max, 1);
        expect_section(&lla_forward_sizes::saved_omega, 1);
        expect_section(&lla_forward_sizes::saved_mean_k, exact.dim);
        expect_section(&lla_forward_sizes::saved_mean_v, exact.value_dim);
        expect_section(&lla_forward_sizes::saved_x, exact.dim);
        const Backward gradients = backward(longer, more), wanted = backward(exact, inputs);
        expect("dq", gradients.dq, wanted.dq, kQueries, kPaddedQueries);
        expect("dk", gradients.dk, wanted.dk, kKeys, kPaddedKeys);
        expect("dv", gradients.dv, wanted.dv, kKeys, kPaddedKeys);
        expect_info(gradients.info, wanted.info);
        if (by_token) {
          expect("dridge", gradients.dridge, wanted.dridge, kQueries, kPaddedQueries);
        } else if (ridge == RidgeShape::none) {
          expect("dx", gradients.dx, wanted.dx, kQueries, kPaddedQueries);
        } else {
          EXPECT_TRUE(identical(gradients.dridge, wanted.dridge)) << longer.text();
        }
      }
    }
  }
}

// ---- windows of any size -------------------------------------------------------------------------------------------

TEST_P(Faults, AWindowLongerThanTheSequencesIsNone) {
  for (const auto& [length_q, length_k] : {std::pair<int64_t, int64_t>{40, 40}, {25, 60}, {60, 25}}) {
    for (const int causal : {0, 1}) {
      Spec spec = self_attention(length_q, 8, 2);
      spec.length_k = length_k;
      spec.options.causal = causal;
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 3);
      const Forward want = forward(spec, inputs);
      const Backward wanted = backward(spec, inputs);
      for (const int64_t size : {length_q + length_k, int64_t{INT32_MAX} - 1, int64_t{INT32_MAX}, int64_t{1} << 32,
                                 int64_t{1} << 62, kLongest - 100, kLongest}) {
        for (const bool left : {true, false}) {
          if (reduced() && (size == kLongest) != left) continue;
          Spec windowed = spec;
          (left ? windowed.options.window_left : windowed.options.window_right) = size;
          SCOPED_TRACE(windowed.text());
          EXPECT_TRUE(identical(forward(windowed, inputs).o, want.o));
          const Backward got = backward(windowed, inputs);
          EXPECT_TRUE(identical(got.dq, wanted.dq));
          EXPECT_TRUE(identical(got.dk, wanted.dk));
          EXPECT_TRUE(identical(got.dv, wanted.dv));
          EXPECT_TRUE(identical(got.dridge, wanted.dridge));
        }
      }
    }
  }
}

// ---- tensors in one buffer -----------------------------------------------------------------------------------------

// A forward call in host memory whose tensors lie where a test puts them.
struct HostCall {
  static constexpr int64_t kLength = 64, kHeads = 2, kDim = 8;
  std::vector<float> memory = std::vector<float>(1 << 16, 0.25f);
  std::vector<float> plain = std::vector<float>(1 << 14, 0.5f);
  float ridge = 0.5f;
  ForwardArgs args;

  lla_tensor at(float* data) const { return dense(data, DType::f32, {1, kLength, kHeads, kDim}); }
  HostCall() {
    args.q = at(plain.data());
    args.k = at(plain.data() + 3000);
    args.v = at(plain.data() + 6000);
    args.o = at(plain.data() + 9000);
    args.ridge = scalar(&ridge);
    EXPECT_TRUE(workspace_bytes(args, args.workspace_bytes));
    args.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    EXPECT_LT(args.workspace_bytes + 512, memory.size() * sizeof(float));
  }
};

TEST(Overlap, AnyOutputWithAnythingElseIsRefusedByName) {
  constexpr int64_t kRow = HostCall::kHeads * HostCall::kDim, kSize = HostCall::kLength * kRow;
  HostCall clean;
  ASSERT_EQ(lla_forward(&clean.args), LLA_OK) << lla_last_error();
  for (const int64_t shift : {-(kSize - 1), -kRow, int64_t{-1}, int64_t{0}, int64_t{1}, kRow, kSize - 1}) {
    HostCall c;
    c.args.o = c.at(c.plain.data() + 3000 + shift);
    EXPECT_EQ(lla_forward(&c.args), LLA_INVALID_ARGUMENT) << shift;
    EXPECT_STREQ(lla_last_error(), "o: is written to, but overlaps k") << shift;
  }
  for (const int64_t shift : {-kSize, kSize}) {  // side by side
    HostCall c;
    c.args.o = c.at(c.plain.data() + 3000 + shift);
    EXPECT_EQ(lla_forward(&c.args), LLA_OK) << lla_last_error();
  }
  HostCall c;
  c.args.v = c.at(static_cast<float*>(c.args.workspace) + 7);
  EXPECT_EQ(lla_forward(&c.args), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(lla_last_error(), "workspace: is written to, but overlaps v");
  HostCall d;
  d.args.ridge = scalar(static_cast<char*>(d.args.workspace) + d.args.workspace_bytes - 4);
  EXPECT_EQ(lla_forward(&d.args), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(lla_last_error(), "workspace: is written to, but overlaps ridge");
  d.args.ridge = scalar(static_cast<char*>(d.args.workspace) + d.args.workspace_bytes);  // the first float behind it
  EXPECT_EQ(lla_forward(&d.args), LLA_OK) << lla_last_error();
}

// q, k and v of one projection, o beside them: (length, 4, heads, dim) in memory. Legal, and the same numbers.
TEST(Overlap, TensorsInterleavedInOneBufferAreFine) {
  HostCall apart, together;
  std::vector<float> buffer(4 * HostCall::kLength * HostCall::kHeads * HostCall::kDim);
  const auto slice = [&](int64_t which) {
    const int64_t row = HostCall::kHeads * HostCall::kDim;
    return strided(buffer.data() + which * row, DType::f32, {1, HostCall::kLength, HostCall::kHeads, HostCall::kDim},
                   {4 * row * HostCall::kLength, 4 * row, HostCall::kDim, 1});
  };
  int which = 0;
  for (lla_tensor* t : {&together.args.q, &together.args.k, &together.args.v, &together.args.o}) *t = slice(which++);
  for (int64_t i = 0; i < HostCall::kLength; ++i) {
    for (int64_t c = 0; c < HostCall::kHeads * HostCall::kDim; ++c) {
      for (int64_t t = 0; t < 3; ++t) {
        const int64_t row = HostCall::kHeads * HostCall::kDim;
        const float value = std::sin(static_cast<float>(t * 977 + i * row + c));
        apart.plain[static_cast<size_t>(t * 3000 + i * row + c)] = value;
        buffer[static_cast<size_t>((i * 4 + t) * row + c)] = value;
      }
    }
  }
  ASSERT_EQ(lla_forward(&apart.args), LLA_OK) << lla_last_error();
  ASSERT_EQ(lla_forward(&together.args), LLA_OK) << lla_last_error();
  const int64_t row = HostCall::kHeads * HostCall::kDim;
  for (int64_t i = 0; i < HostCall::kLength; ++i) {
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison,cert-flp37-c): the same bits
    EXPECT_EQ(std::memcmp(&buffer[static_cast<size_t>((i * 4 + 3) * row)],
                          &apart.plain[static_cast<size_t>(9000 + i * row)], sizeof(float) * row),
              0)
        << i;
  }
}

// ---- threads -------------------------------------------------------------------------------------------------------

struct RestoreThreads {
  ~RestoreThreads() { lla_set_num_threads(0); }
};

TEST(Threads, ARefusedNumberIsSaid) {
  EXPECT_EQ(lla_set_num_threads(-3), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(lla_last_error(), "threads: -3 must be at least 0 (0: the default)");
  EXPECT_EQ(lla_set_num_threads(0), LLA_OK);
  EXPECT_STREQ(lla_last_error(), "");
}

// Whatever the number was when the workspace was asked for, the call runs in it, with the same bits.
TEST(Threads, MayChangeBetweenTheQuestionAndTheCall) {
  const RestoreThreads restore;
  constexpr int64_t kLength = 200, kHeads = 6, kDim = 32;
  const size_t count = kLength * kHeads * kDim;
  std::vector<float> data(3 * count), o(count), want;
  for (size_t i = 0; i < data.size(); ++i) data[i] = std::sin(static_cast<float>(i * 7 % 1013));
  float ridge = 0.3f;
  for (const lla_weights weights : {LLA_WEIGHTS_AUTO, LLA_WEIGHTS_CACHED, LLA_WEIGHTS_RECOMPUTE}) {
    // The last limit lets the weights of few threads be cached, but not those of many: more memory for fewer threads.
    for (const int64_t limit : {int64_t{1} << 30, int64_t{300'000}}) {
      ForwardArgs args;
      const auto tensor = [&](float* at) { return dense(at, DType::f32, {1, kLength, kHeads, kDim}); };
      args.q = tensor(data.data());
      args.k = tensor(data.data() + count);
      args.v = tensor(data.data() + 2 * count);
      args.o = tensor(o.data());
      args.ridge = scalar(&ridge);
      args.options.weights = weights;
      args.options.cached_weights_limit = limit;
      for (const int asked : {1, 2, 3, 5, 8, 17, 64, 1024}) {
        for (const int called : {1, 2, 3, 5, 8, 17, 64, 1024}) {
          if (reduced() && (asked % 3 == 2 || called % 3 == 2 || called > 8)) continue;
          ASSERT_EQ(lla_set_num_threads(asked), LLA_OK);
          const Workspace workspace(args);
          ASSERT_EQ(lla_set_num_threads(called), LLA_OK);
          ASSERT_EQ(lla_forward(&args), LLA_OK) << asked << " then " << called << ": " << lla_last_error();
          if (want.empty()) want = o;
          ASSERT_EQ(o, want) << asked << " then " << called;
        }
      }
    }
  }
}

// The same by accident: another thread of the program changes the number all the time.
TEST(Threads, MayChangeAtAnyTime) {
  const RestoreThreads restore;
  std::atomic<bool> stop{false};
  std::thread changing([&] {
    for (int i = 0; !stop; ++i) lla_set_num_threads(1 + i % 5);
  });
  constexpr int64_t kLength = 128, kHeads = 4, kDim = 32;
  std::vector<float> data(kLength * kHeads * kDim, 0.5f), o(data.size());
  float ridge = 0.3f;
  ForwardArgs args;
  args.q = args.k = args.v = dense(data.data(), DType::f32, {1, kLength, kHeads, kDim});
  args.o = dense(o.data(), DType::f32, {1, kLength, kHeads, kDim});
  args.ridge = scalar(&ridge);
  int failed = 0;
  for (int i = 0; i < (reduced() ? 50 : 500); ++i) {
    const Workspace workspace(args);
    failed += lla_forward(&args) != LLA_OK;
  }
  stop = true;
  changing.join();
  EXPECT_EQ(failed, 0) << lla_last_error();
}

// ---- the calling thread --------------------------------------------------------------------------------------------

// A rounding mode, flushed subnormals or traps of the caller's thread: neither results nor their independence of the
// number of threads depend on them, and the caller finds them again.
TEST(CallingThread, ItsFloatingPointEnvironmentDoesNotMatter) {
  const RestoreThreads restore;
  std::vector<float> want;
  for (const int mode : {0, FE_UPWARD, FE_TOWARDZERO}) {
    for (const bool traps : {false, true}) {
      for (const float size : {1.0f, 1e-20f}) {  // products of the latter are subnormal
        for (const int threads : {1, 4}) {
          lla_set_num_threads(threads);
          constexpr int64_t kLength = 256, kHeads = 2, kDim = 32;
          std::vector<float> data(3 * kLength * kHeads * kDim), o(data.size() / 3);
          for (size_t i = 0; i < data.size(); ++i) data[i] = size * std::sin(static_cast<float>(i % 1009));
          float ridge = 1e-3f * size;
          ForwardArgs args;
          const auto tensor = [&](size_t which) {
            return dense(data.data() + which * o.size(), DType::f32, {1, kLength, kHeads, kDim});
          };
          args.q = tensor(0), args.k = tensor(1), args.v = tensor(2);
          args.o = dense(o.data(), DType::f32, {1, kLength, kHeads, kDim});
          args.ridge = scalar(&ridge);
          const Workspace workspace(args);
          std::fenv_t before;
          std::fegetenv(&before);
          std::fesetround(mode);
          if (traps) feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
#if defined(__SSE2__)
          _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero
          const unsigned set = _mm_getcsr();
#endif
          const lla_status status = lla_forward(&args);
          EXPECT_EQ(std::fegetround(), mode);
#if defined(__SSE2__)
          EXPECT_EQ(_mm_getcsr(), set);
#endif
          std::fesetenv(&before);
          ASSERT_EQ(status, LLA_OK) << lla_last_error();
          if (size == 1.0f) {
            if (want.empty()) want = o;
            EXPECT_EQ(o, want) << "mode " << mode << ", traps " << traps << ", threads " << threads;
          }
          EXPECT_TRUE(std::any_of(o.begin(), o.end(), [](float x) { return x != 0; }));
        }
      }
    }
  }
}

// musl gives a thread 128 KiB of stack; some runtimes less. A call needs less than that.
TEST(CallingThread, NeedsLittleStack) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more";
#endif
  lla_set_num_threads(1);
  const RestoreThreads restore;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 128 * 1024), 0);
  pthread_t thread;
  lla_status status = LLA_INTERNAL;
  const auto body = [](void* result) -> void* {
    constexpr int64_t kLength = 40, kDim = 256;
    std::vector<double> data(3 * kLength * kDim, 0.5), o(kLength * kDim);
    double ridge = 0.5;
    for (const lla_solver solver : {LLA_SOLVER_CG, LLA_SOLVER_DIRECT}) {
      ForwardArgs args;
      args.q = args.k = args.v = dense(data.data(), DType::f64, {1, kLength, 1, kDim});
      args.o = dense(o.data(), DType::f64, {1, kLength, 1, kDim});
      args.ridge = scalar(&ridge, DType::f64);
      args.options.solver = solver;
      const Workspace workspace(args);
      *static_cast<lla_status*>(result) = lla_forward(&args);
    }
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, body, &status), 0);
  pthread_join(thread, nullptr);
  EXPECT_EQ(status, LLA_OK);
}

}  // namespace
}  // namespace lla::test
