// Structs of callers that were built for an older header: the fields they do not have mean their defaults.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "support/run.hpp"

namespace lla::test {
namespace {

// The first `size` bytes of a struct at the very end of their memory: a sanitizer sees who reads on.
template <class Struct>
class Cut {
 public:
  Cut(const Struct& whole, size_t size) : memory_(static_cast<std::byte*>(::operator new(size))) {
    std::memcpy(memory_.get(), &whole, size);
    std::memcpy(memory_.get(), &size, sizeof size);
  }
  Struct* get() const { return reinterpret_cast<Struct*>(memory_.get()); }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
};

struct Small {
  std::vector<float> q = std::vector<float>(6 * 4, 0.25f), k = q, v = q, o = std::vector<float>(6 * 4);
  float ridge = 0.5f;
  ForwardArgs args;
  std::unique_ptr<Workspace> workspace;

  Small() {
    for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i % 7) - 3, v[i] = static_cast<float>(i % 5);
    const auto view = [](std::vector<float>& t) { return dense(t.data(), DType::f32, {1, 6, 1, 4}); };
    args.q = view(q), args.k = view(k), args.v = view(v), args.o = view(o);
    args.ridge = scalar(&ridge);
    workspace = std::make_unique<Workspace>(args);
  }
  std::vector<float> run() {
    EXPECT_TRUE(forward(args)) << lla_last_error();
    return o;
  }
};

TEST(Structs, ArgumentsOneFieldShorterMeanTheDefault) {
  Small call;
  const std::vector<float> want = call.run();
  for (const size_t size : {offsetof(lla_forward_args, max_total_k), offsetof(lla_forward_args, first_key),
                            offsetof(lla_forward_args, seqlens_k)}) {
    const Cut<lla_forward_args> older(call.args, size);
    std::fill(call.o.begin(), call.o.end(), -1.0f);
    EXPECT_EQ(lla_forward(older.get()), LLA_OK) << lla_last_error();
    EXPECT_EQ(call.o, want);
    ForwardSizes sizes;
    EXPECT_EQ(lla_forward_query(older.get(), &sizes), LLA_OK) << lla_last_error();
  }
}

TEST(Structs, OptionsOneFieldShorterMeanTheDefault) {
  Small call;
  call.args.options.causal = 0;
  const std::vector<float> want = call.run();
  Options options = call.args.options;
  options.precision = options.batch_invariant = 77;  // behind the end: not looked at
  const Cut<lla_options> older(options, offsetof(lla_options, precision));
  lla_forward_args args = call.args;
  args.options = older.get();
  EXPECT_EQ(lla_forward(&args), LLA_OK) << lla_last_error();
  EXPECT_EQ(call.o, want);
  const Cut<lla_options> defaults(options, offsetof(lla_options, causal));
  args.options = defaults.get();
  EXPECT_EQ(lla_forward(&args), LLA_OK) << lla_last_error();
  EXPECT_NE(call.o, want);
}

// A size that ends within a pointer would leave half an address.
TEST(Structs, ASizeNoStructHasIsRefused) {
  Small call;
  call.args.options.implementation = "cpu";
  lla_forward_args args = call.args;
  for (size_t size = 0; size <= sizeof args; ++size) {
    if (size >= sizeof size && size % alignof(lla_forward_args) == 0) continue;
    args.struct_size = size;
    EXPECT_EQ(lla_forward(&args), LLA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(lla_last_error()).find("args: struct_size is " + std::to_string(size) + ", which no"), 0);
  }
  args.struct_size = sizeof args;
  for (size_t size = 0; size <= sizeof(lla_options); ++size) {
    const bool whole = size >= sizeof size && size % alignof(lla_options) == 0;
    call.args.options.struct_size = size;
    EXPECT_EQ(lla_forward(&args), whole ? LLA_OK : LLA_INVALID_ARGUMENT) << size << ": " << lla_last_error();
  }
}

TEST(Structs, NoOptionsAreTheDefaults) {
  Small call;
  const std::vector<float> want = call.run();
  lla_forward_args args = call.args;
  args.options = nullptr;
  EXPECT_EQ(lla_forward(&args), LLA_OK) << lla_last_error();
  EXPECT_EQ(call.o, want);
}

// Memory on demand: one call, no query; the outputs and the saved vector may come with it.
TEST(Structs, MemoryOnDemand) {
  Small call;
  const std::vector<float> want = call.run();
  struct Context {
    std::vector<float> o, saved;
    std::vector<std::byte> workspace;
    int asked = 0;
    lla_status answer = LLA_OK;
    size_t short_by = 0;
  } context;
  lla_forward_args args = call.args;
  args.o.data = args.workspace = nullptr;
  args.workspace_bytes = 0;
  args.allocate = [](void* to, const lla_forward_sizes* sizes, lla_forward_args* a) {
    auto& c = *static_cast<Context*>(to);
    ++c.asked;
    c.o.assign(24, -1.0f);
    c.saved.assign(static_cast<size_t>(sizes->saved_elements), std::nanf(""));
    c.workspace.resize(sizes->workspace_bytes + 256);
    a->o.data = c.o.data();
    a->saved = dense(c.saved.data(), DType::f32, {sizes->saved_elements});
    a->workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(c.workspace.data()) + 255) / 256 * 256);
    a->workspace_bytes = sizes->workspace_bytes - c.short_by;
    return c.answer;
  };
  args.allocate_context = &context;
  EXPECT_EQ(lla_forward(&args), LLA_OK) << lla_last_error();
  EXPECT_EQ(context.asked, 1);
  EXPECT_EQ(context.o, want);
  EXPECT_EQ(args.o.data, nullptr) << "the caller's own struct was changed";
  for (const float x : context.saved) EXPECT_FALSE(std::isnan(x));

  for (const lla_status answer : {LLA_INVALID_ARGUMENT, LLA_OUT_OF_MEMORY}) {
    context.answer = answer;
    EXPECT_EQ(lla_forward(&args), answer);
    EXPECT_EQ(lla_last_error(), std::string("allocate: the caller's function answered ") + lla_status_name(answer));
  }
  EXPECT_EQ(std::count(context.o.begin(), context.o.end(), -1.0f), 24) << "written without memory";
  context.answer = LLA_OK;
  context.short_by = 1;
  EXPECT_EQ(lla_forward(&args), LLA_WORKSPACE_TOO_SMALL);
  context.asked = 0;
  args.q.data = nullptr;  // inputs must be there before anything is asked for
  EXPECT_EQ(lla_forward(&args), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(context.asked, 0);
}

TEST(Structs, BackwardArgumentsMayBeShorter) {
  BackwardArgs args;
  const Cut<lla_backward_args> older(args, offsetof(lla_backward_args, stream));
  BackwardSizes sizes;
  EXPECT_EQ(lla_backward_query(older.get(), &sizes), LLA_INVALID_ARGUMENT);
  EXPECT_STREQ(lla_last_error(), "q: is absent");
}

TEST(Structs, ACallersStructIsFilledToItsOwnSize) {
  alignas(lla_options) std::byte memory[sizeof(lla_options) + 16];
  for (const size_t size : {size_t{8}, offsetof(lla_options, batch_invariant), sizeof(lla_options), sizeof memory}) {
    std::memset(memory, 0xAB, sizeof memory);
    auto* const options = reinterpret_cast<lla_options*>(memory);
    lla_options_init_size(options, size);
    EXPECT_EQ(options->struct_size, size);
    if (size > offsetof(lla_options, causal)) {
      EXPECT_EQ(options->causal, 1);
    }
    for (size_t i = size; i < sizeof memory; ++i) EXPECT_EQ(memory[i], std::byte{0xAB}) << i;
  }
  Small call;
  auto* const newer = reinterpret_cast<lla_options*>(memory);
  lla_options_init_size(newer, sizeof memory);
  lla_forward_args args = call.args;
  args.options = newer;
  EXPECT_EQ(lla_forward(&args), LLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(lla_last_error()).find("options: struct_size is "), std::string::npos) << lla_last_error();
}

TEST(Structs, AShorterAnswerIsFilledAsFarAsItGoes) {
  Small call;
  ForwardSizes whole, shorter;
  ASSERT_TRUE(query(call.args, whole));
  EXPECT_EQ(whole.saved_elements, 6 * (2 * 4 + 4 + 2));
  shorter.struct_size = offsetof(lla_forward_sizes, saved_elements);
  shorter.saved_elements = -7;
  ASSERT_TRUE(query(call.args, shorter)) << lla_last_error();
  EXPECT_EQ(shorter.workspace_bytes, whole.workspace_bytes);
  EXPECT_EQ(shorter.saved_elements, -7);
  for (const size_t size : {size_t{0}, size_t{12}, sizeof(lla_forward_sizes) + 8}) {
    shorter.struct_size = size;
    EXPECT_EQ(query(call.args, shorter).code(), LLA_INVALID_ARGUMENT);
  }
}

// The C++ arguments own their options: a copy has its own.
TEST(Structs, CopiedArgumentsHaveOptionsOfTheirOwn) {
  ForwardArgs first;
  first.options.causal = 0;
  ForwardArgs second = first;
  second.options.causal = 1;
  EXPECT_EQ(first.options.causal, 0);
  const lla_forward_args &a = first, &b = second;
  EXPECT_EQ(a.options, &first.options);
  EXPECT_EQ(b.options, &second.options);
  first = second;
  EXPECT_EQ(a.options, &first.options);
  EXPECT_EQ(a.options->causal, 1);
}

}  // namespace
}  // namespace lla::test
