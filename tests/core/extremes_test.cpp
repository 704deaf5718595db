// Arguments at the ends of their types and arguments bent in one field: answered, never acted on blindly. Run under the
// undefined-behaviour sanitizer, which sees a size or an offset overflow wherever it happens.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "plan/implementation.hpp"
#include "support/run.hpp"
#include "validate/overlap.hpp"
#include "validate/validate.hpp"

namespace lla::test {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// Everything that can be asked about a call without running it.
void ask_everything(const lla_forward_args& forward, const lla_backward_args& backward) {
  ForwardSizes sizes;
  BackwardSizes backward_sizes;
  char text[256];
  for (const lla_status status :
       {lla_forward_query(&forward, &sizes), lla_forward_plan(&forward, text, sizeof text),
        lla_forward_explain(&forward, text, sizeof text), lla_backward_query(&backward, &backward_sizes),
        lla_backward_plan(&backward, text, sizeof text)}) {
    EXPECT_TRUE(status == LLA_OK || status == LLA_INVALID_ARGUMENT || status == LLA_UNSUPPORTED)
        << lla_status_name(status) << ": " << lla_last_error();
  }
}

// ---- sizes ---------------------------------------------------------------------------------------------------------

lla_tensor huge(DType dtype, std::initializer_list<int64_t> size, bool expanded) {
  lla_tensor t = dense(nullptr, dtype, size);
  if (expanded) std::fill(t.stride, t.stride + t.ndim, 0);
  return t;
}

struct Question {
  ForwardArgs forward;
  BackwardArgs backward;
  int64_t b, lq, lk, hq, hkv, d, dv;

  std::string text() const {
    return core::cat(b, " ", lq, " ", lk, " ", hq, " ", hkv, " ", d, " ", dv, " window ", forward.options.window_left);
  }
};

// A question about a problem with these sizes; inputs are views with stride 0, the only ones that can be so large.
void fill(Question& q, bool packed, DType dtype) {
  const auto rows = [&](int64_t channels, bool expanded) {
    return packed ? huge(dtype, {q.lq, q.hq, channels}, expanded) : huge(dtype, {q.b, q.lq, q.hq, channels}, expanded);
  };
  const auto keys = [&](int64_t channels, bool expanded) {
    return packed ? huge(dtype, {q.lk, q.hkv, channels}, expanded)
                  : huge(dtype, {q.b, q.lk, q.hkv, channels}, expanded);
  };
  const auto fill = [&](auto& args) {
    args.q = rows(q.d, true);
    args.k = keys(q.d, true);
    args.v = keys(q.dv, true);
    args.ridge = dense(nullptr, dtype == DType::f64 ? DType::f64 : DType::f32, {});
    if (packed) {
      args.cu_seqlens_q = args.cu_seqlens_k = huge(DType::i32, {q.b < kMost ? q.b + 1 : q.b}, false);
      args.max_seqlen_q = q.lq;
    }
  };
  fill(q.forward);
  fill(q.backward);
  q.forward.o = rows(q.dv, false);
  q.backward.grad_o = rows(q.dv, true);
  q.backward.dq = rows(q.d, false);
  q.backward.dk = keys(q.d, false);
  q.backward.dv = keys(q.dv, false);
  ForwardSizes sizes;
  if (query(q.forward, sizes))
    q.backward.saved = huge(dtype == DType::f64 ? DType::f64 : DType::f32, {sizes.saved_elements}, false);
}

// Every pair of dimensions at every pair of sizes, the others 1: what is smallest beside the large ones leaves most
// room to wrap.
TEST(Extremes, SizesAreAnsweredOrRefusedAndNeverWrap) {
  std::vector<int64_t> sizes = {0,          1ll << 31, 1ll << 40, 1ll << 41,       1ll << 42, 1ll << 47, 1ll << 55,
                                1ll << 57,  1ll << 62, kMost,     (1ll << 36) + 1, 1ll << 20, 3,         INT32_MAX,
                                kMost - 11, 1ll << 58, 64};
  if (reduced()) sizes.resize(10);
  std::mt19937_64 random(1);
  int taken = 0, i = 0;
  constexpr int kDims = 5;
  for (int first = 0; first < kDims; ++first) {
    for (int second = first + 1; second < kDims; ++second) {
      for (const int64_t size_first : sizes) {
        for (const int64_t size_second : sizes) {
          ++i;
          Question q;
          int64_t size[kDims] = {1, 1, 1, 1, 1};
          size[first] = size_first, size[second] = size_second;
          q.b = size[0], q.lq = size[1], q.lk = size[2], q.hq = q.hkv = size[3], q.d = q.dv = size[4];
          for (lla_options* o :
               {static_cast<lla_options*>(&q.forward.options), static_cast<lla_options*>(&q.backward.options)}) {
            o->window_left = o->window_right = i % 3 ? -1 : sizes[random() % sizes.size()];
            o->causal = i % 2;
            o->cached_weights_limit = i % 4 ? kMost : 1 << 20;
            o->max_iterations = i % 5 ? 0 : INT32_MAX;
            o->solver = static_cast<int32_t>(i % 3);
            o->weights = static_cast<int32_t>(i / 3 % 3);
          }
          const bool packed = i % 5 == 0;
          fill(q, packed, i % 2 ? DType::f32 : i % 4 ? DType::f64 : DType::bf16);
          ask_everything(q.forward, q.backward);
          ForwardSizes sizes;
          if (!query(q.forward, sizes)) continue;
          ++taken;
          // What was taken can be counted: the saved vector has its rows, and one head of keys and values a copy.
          const auto product = [](std::initializer_list<int64_t> factors) {
            long double n = 1;
            for (int64_t f : factors) n *= static_cast<long double>(f);
            return n;
          };
          const long double rows = product({packed ? 1 : q.b, q.lq, q.hq});
          EXPECT_GE(static_cast<long double>(sizes.saved_elements), rows * static_cast<long double>(2 * q.d + q.dv + 2))
              << q.text();
          q.forward.options.implementation = "cpu";  // the reference asks for no memory
          if (rows == 0 || q.b == 0 || !query(q.forward, sizes)) continue;
          EXPECT_GE(static_cast<long double>(sizes.workspace_bytes), product({q.lk, q.d + q.dv, 4})) << q.text();
          EXPECT_LT(sizes.workspace_bytes, size_t{1} << 62) << q.text();
        }
      }
    }
  }
  EXPECT_GT(taken, i / 20);
}

// A million sequences of one token: what a head's arrays are rounded up to must not be multiplied by all of them.
TEST(Extremes, ManyShortSequencesTakeLittleMemory) {
  Question q;
  q.b = 1'000'000, q.lq = q.lk = q.hq = q.hkv = q.d = q.dv = 1;
  fill(q, false, DType::f32);
  size_t bytes = 0;
  ASSERT_TRUE(workspace_bytes(q.forward, bytes)) << lla_last_error();
  EXPECT_LT(bytes, size_t{256} << 20);
  ASSERT_TRUE(workspace_bytes(q.backward, bytes)) << lla_last_error();
  EXPECT_LT(bytes, size_t{256} << 20);
}

// Every planner of this build, the GPU's too, at the edge of what is accepted.
TEST(Extremes, EveryPlannerAnswersTheLargestProblems) {
  std::mt19937_64 random(2);
  const core::Machine machine = core::h200();
  int planned = 0;
  for (int i = 0; i < (reduced() ? 500 : 20000); ++i) {
    Question q;
    const auto power = [&](int bits) { return int64_t{1} << (random() % static_cast<unsigned>(bits + 1)); };
    q.d = std::min<int64_t>(power(9), 256);
    q.dv = std::min<int64_t>(power(9), 256);
    const int bits = 41 - static_cast<int>(std::ceil(std::log2(static_cast<double>(q.d + q.dv))));
    q.b = power(bits);
    const auto left = [&](int64_t used) {
      return std::max(0, bits - static_cast<int>(std::log2(static_cast<double>(used))));
    };
    q.hkv = power(left(q.b));
    q.hq = q.hkv;
    q.lq = power(left(q.b * q.hq)) + static_cast<int64_t>(random() % 3);
    q.lk = power(left(q.b * q.hkv)) + static_cast<int64_t>(random() % 3);
    for (lla_options* o :
         {static_cast<lla_options*>(&q.forward.options), static_cast<lla_options*>(&q.backward.options)}) {
      o->window_left = random() % 2 ? kMost : static_cast<int64_t>(random() % 1000);
      o->window_right = random() % 2 ? -1 : kMost;
      o->causal = i % 2;
      o->cached_weights_limit = kMost;
      o->weights = static_cast<int32_t>(i / 2 % 3);
      o->max_iterations = INT32_MAX;
    }
    fill(q, i % 4 == 0, i % 2 ? DType::bf16 : DType::f32);
    core::ForwardCall forward;
    core::BackwardCall backward;
    if (!core::validate(q.forward, core::Pointers::optional, forward)) continue;
    ASSERT_TRUE(core::validate(q.backward, core::Pointers::optional, backward)) << q.text();
    for (const core::Implementation* implementation : core::implementations()) {
      for (const core::Problem* p : {&forward.problem, &backward.problem}) {
        if (!implementation->refuse(*p, machine).empty()) continue;
        ++planned;
        EXPECT_LT(implementation->plan(*p, machine).workspace_bytes, size_t{1} << 62) << q.text();
      }
    }
  }
  EXPECT_GT(planned, 100);
}

// A view without elements may have any strides and other sizes: nobody multiplies them.
TEST(Extremes, ViewsWithoutElementsMayHaveAnyStrides) {
  float memory[8] = {};
  const float ridge = 1;
  ForwardArgs args;
  args.q = args.k = args.v = args.o = strided(memory, DType::f32, {3, 0, 1, 4}, {kMost, kMost, kMost, kMost});
  args.ridge = scalar(&ridge);
  EXPECT_EQ(lla_forward(&args), LLA_OK) << lla_last_error();
  EXPECT_FALSE(core::overlap(args.q, args.k));
}

// ---- one field bent ------------------------------------------------------------------------------------------------

// Offsets of what a mutation must leave alone: addresses, which no library can check.
std::vector<size_t> addresses(const lla_forward_args& a) {
  std::vector<size_t> list;
  const auto add = [&](const void* field) {
    const auto at = static_cast<size_t>(static_cast<const char*>(field) - reinterpret_cast<const char*>(&a));
    list.insert(list.end(), {at, at + 4});
  };
  for (const lla_tensor* t : {&a.q, &a.k, &a.v, &a.ridge, &a.x, &a.o, &a.cu_seqlens_q, &a.cu_seqlens_k, &a.saved,
                              &a.iterations, &a.residual, &a.row_status, &a.seqlens_k, &a.page_table, &a.first_key})
    add(&t->data);
  add(&a.workspace);
  add(&a.stream);
  add(&a.options);
  add(&a.allocate);
  add(&a.allocate_context);
  return list;
}

const std::vector<uint32_t>& bent_words() {
  static const std::vector<uint32_t> words = {0u,          1u,          2u,          3u,          5u,
                                              255u,        0x7fffffffu, 0x80000000u, 0xffffffffu, 0xfffffffeu,
                                              0x7ff00000u, 0x3f800000u, 0xfff80000u, 1u << 20};
  return words;
}

// One word of a legal call at a time, packed and not: every question is answered, and a call whose sizes and addresses
// are still its own writes its outputs or nothing.
TEST(Extremes, OneBentWordIsAnsweredAndWritesNothingElse) {
  for (const bool packed : {false, true}) {
    Spec spec = self_attention(6, 4, 2);
    if (packed) spec.cu_q = spec.cu_k = {0, 2, 6};
    spec.ridge = RidgeShape::token;
    const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.5, 1);
    Memory& m = host_memory();
    const auto input = [&](const char* name, const std::vector<int64_t>& size, const std::vector<double>& values) {
      return TestTensor(m, name, DType::f32, size, Layout::dense, values);
    };
    const TestTensor q = input("q", spec.rows_size(4), inputs.q), k = input("k", spec.keys_size(4), inputs.k),
                     v = input("v", spec.keys_size(spec.value_dim), inputs.v),
                     ridge = input("ridge", spec.ridge_size(), inputs.ridge);
    TestTensor cu;
    if (packed) cu = TestTensor(m, "cu", DType::i32, {3}, Layout::dense, {0, 2, 6});
    const TestTensor o(m, "o", DType::f32, spec.rows_size(spec.value_dim)),
        status(m, "status", DType::i32, spec.info_size());
    ForwardArgs legal;
    legal.q = q.view(), legal.k = k.view(), legal.v = v.view(), legal.ridge = ridge.view(), legal.o = o.view();
    legal.cu_seqlens_q = legal.cu_seqlens_k = cu.view();
    legal.row_status = status.view();
    size_t bytes = 0;
    ASSERT_TRUE(workspace_bytes(legal, bytes)) << lla_last_error();
    GuardedBuffer workspace(m, bytes);
    legal.workspace = workspace.data();
    legal.workspace_bytes = bytes;
    const auto untouchable = addresses(legal);
    const size_t tensors = offsetof(lla_forward_args, q), behind = offsetof(lla_forward_args, max_seqlen_q);
    for (size_t at = 0; at < sizeof(lla_forward_args); at += 4) {
      if (std::find(untouchable.begin(), untouchable.end(), at) != untouchable.end()) continue;
      for (const uint32_t word : bent_words()) {
        if (reduced() && (at / 4 + word) % 3 != 0) continue;
        lla_forward_args bent = static_cast<const lla_forward_args&>(legal);
        std::memcpy(reinterpret_cast<char*>(&bent) + at, &word, 4);
        SCOPED_TRACE(testing::Message() << "word at " << at << " = " << word);
        BackwardArgs none;
        ask_everything(bent, none);
        // Sizes and strides may name memory that is not there: those are only asked about.
        if (at >= tensors && at < behind) continue;
        if (at >= offsetof(lla_forward_args, saved) && at < offsetof(lla_forward_args, workspace)) continue;
        if (at >= offsetof(lla_forward_args, workspace_bytes) && word > bytes) continue;  // there is not more of it
        lla_forward(&bent);
        EXPECT_TRUE(workspace.guards_intact());
        for (const TestTensor* t : {&q, &k, &v, &ridge, &o, &status}) t->expect_intact();
      }
    }
  }
}

// ---- overlap against counting --------------------------------------------------------------------------------------

TEST(Extremes, OverlapAgreesWithAMapOfBytes) {
  std::mt19937 random(3);
  static uint8_t memory[4096];
  int overlapping = 0, apart = 0;
  for (int i = 0; i < (reduced() ? 10000 : 100000); ++i) {
    const auto make = [&] {
      lla_tensor t{};
      t.dtype = random() % 2 ? LLA_F32 : LLA_BF16;
      t.ndim = static_cast<int32_t>(random() % 4);
      for (int d = 0; d < t.ndim; ++d) {
        t.size[d] = random() % 5;
        t.stride[d] = random() % 2 ? random() % 12 : random() % 40;
      }
      t.data = memory + random() % 64 * 2;
      return t;
    };
    const lla_tensor a = make(), b = make();
    const auto bytes = [](const lla_tensor& t, const std::function<void(size_t)>& visit) {
      const int64_t width = core::size_of(static_cast<DType>(t.dtype));
      int64_t index[4] = {}, count = 1;
      for (int d = 0; d < t.ndim; ++d) count *= t.size[d];
      for (int64_t n = 0; n < count; ++n) {
        int64_t rest = n, offset = 0;
        for (int d = 0; d < t.ndim; ++d) {
          index[d] = rest % t.size[d];
          rest /= t.size[d];
          offset += index[d] * t.stride[d];
        }
        for (int64_t byte = 0; byte < width; ++byte)
          visit(static_cast<size_t>(static_cast<uint8_t*>(t.data) - memory + offset * width + byte));
      }
    };
    std::vector<bool> in_a(sizeof memory);
    bool want = false;
    bytes(a, [&](size_t at) { in_a[at] = true; });
    bytes(b, [&](size_t at) { want = want || in_a[at]; });
    ASSERT_EQ(core::overlap(a, b), want) << core::shape_text(a) << " and " << core::shape_text(b);
    ASSERT_EQ(core::overlap(b, a), want);
    ++(want ? overlapping : apart);
  }
  EXPECT_GT(overlapping, 500);
  EXPECT_GT(apart, 500);
}

}  // namespace
}  // namespace lla::test
