// Bad input: a status code, a sentence that names the argument and the values that clash, and not a byte written.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "support/run.hpp"

namespace lla::test {
namespace {

constexpr int64_t B = 2, Lq = 5, Lk = 7, Hq = 4, Hkv = 2, D = 8, Dv = 6;
constexpr int64_t kHuge = int64_t{1} << 40;

// Tensors of a legal call, outputs poisoned. A fresh one for every case.
struct Call {
  Memory& m = host_memory();
  bool packed;
  TestTensor q, k, v, ridge, grad_o, cu_q, cu_k, saved_in;
  TestTensor o, saved, iterations, residual, row_status, dq, dk, dv, dridge;
  GuardedBuffer workspace;
  ForwardArgs forward;
  BackwardArgs backward;

  explicit Call(bool packed) : packed(packed), workspace(m, size_t{1} << 20) {
    const Spec s = spec();
    const auto input = [&](const char* name, std::vector<int64_t> size) {
      size_t count = 1;
      for (int64_t n : size) count *= static_cast<size_t>(n);
      return TestTensor(m, name, DType::f32, size, Layout::dense, std::vector<double>(count, 0.5));
    };
    q = input("q", s.rows_size(D));
    k = input("k", s.keys_size(D));
    v = input("v", s.keys_size(Dv));
    ridge = input("ridge", s.ridge_size());
    grad_o = input("grad_o", s.rows_size(Dv));
    o = TestTensor(m, "o", DType::f32, s.rows_size(Dv));
    iterations = TestTensor(m, "iterations", DType::i32, s.info_size());
    residual = TestTensor(m, "residual", DType::f32, s.info_size());
    row_status = TestTensor(m, "row_status", DType::i32, s.info_size());
    dq = TestTensor(m, "dq", DType::f32, s.rows_size(D));
    dk = TestTensor(m, "dk", DType::f32, s.keys_size(D));
    dv = TestTensor(m, "dv", DType::f32, s.keys_size(Dv));
    dridge = TestTensor(m, "dridge", DType::f32, s.ridge_size());
    if (packed) {
      cu_q = TestTensor(m, "cu_seqlens_q", DType::i32, {3}, Layout::dense, {0, 4, 10});
      cu_k = TestTensor(m, "cu_seqlens_k", DType::i32, {3}, Layout::dense, {0, 6, 14});
    }
    fill(forward);
    forward.o = o.view();
    ForwardSizes sizes;
    EXPECT_TRUE(query(forward, sizes)) << lla_last_error();
    const int64_t size = sizes.saved_elements;
    saved = TestTensor(m, "saved", DType::f32, {size});
    saved_in =
        TestTensor(m, "saved", DType::f32, {size}, Layout::dense, std::vector<double>(static_cast<size_t>(size), 1.0));
    forward.saved = saved.view();
    fill(backward);
    backward.saved = saved_in.view();
    backward.grad_o = grad_o.view();
    backward.dq = dq.view();
    backward.dk = dk.view();
    backward.dv = dv.view();
    backward.dridge = dridge.view();
  }

  Spec spec() const {
    Spec s;
    s.batch = packed ? 1 : B;
    s.length_q = packed ? B * Lq : Lq;
    s.length_k = packed ? B * Lk : Lk;
    s.heads_q = Hq;
    s.heads_kv = Hkv;
    s.dim = D;
    s.value_dim = Dv;
    s.ridge = RidgeShape::token;
    if (packed) s.cu_q = s.cu_k = {0, 0};
    return s;
  }

  template <class Args>
  void fill(Args& args) const {
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.ridge = ridge.view();
    args.cu_seqlens_q = cu_q.view();
    args.cu_seqlens_k = cu_k.view();
    args.iterations = iterations.view();
    args.residual = residual.view();
    args.row_status = row_status.view();
    args.workspace = workspace.data();
    args.workspace_bytes = workspace.size();
  }

  void expect_untouched() const {
    for (const TestTensor* t : {&o, &saved, &iterations, &residual, &row_status, &dq, &dk, &dv, &dridge})
      t->expect_untouched();
    for (const TestTensor* t : {&q, &k, &v, &ridge, &grad_o, &cu_q, &cu_k, &saved_in}) t->expect_intact();
  }
};

using Words = std::vector<std::string>;

// Message must hold every word. `code` is what the call itself answers.
void expect_refused(const Call& call, lla_status got, const Words& words, lla_status code = LLA_INVALID_ARGUMENT) {
  const std::string message = lla_last_error();
  EXPECT_EQ(got, code) << lla_status_name(got) << ": " << message;
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "no \"" << word << "\" in: " << message;
  call.expect_untouched();
}

// ---- what forward and backward share: the change is made to both calls ---------------------------------------------

struct Edit {
  Call& call;
  lla_tensor &q, &k, &v, &ridge;
  lla_options& options;
};

struct SharedCase {
  const char* name;
  bool packed;
  std::function<void(Edit)> change;
  Words words;
};

const std::vector<SharedCase>& shared_cases() {
  static const std::vector<SharedCase> cases = {
      {"q_absent", false, [](Edit e) { e.q = {}; }, {"q", "absent"}},
      {"k_absent", false, [](Edit e) { e.k = {}; }, {"k", "absent"}},
      {"v_absent", false, [](Edit e) { e.v = {}; }, {"v", "absent"}},
      {"ridge_absent", false, [](Edit e) { e.ridge = {}; }, {"ridge", "x", "exactly one"}},
      {"q_null", false, [](Edit e) { e.q.data = nullptr; }, {"q", "null", "(2, 5, 4, 8)"}},
      {"k_null", false, [](Edit e) { e.k.data = nullptr; }, {"k", "null", "(2, 7, 2, 8)"}},
      {"v_null", false, [](Edit e) { e.v.data = nullptr; }, {"v", "null", "(2, 7, 2, 6)"}},
      {"ridge_null", false, [](Edit e) { e.ridge.data = nullptr; }, {"ridge", "null"}},
      {"q_misaligned", false, [](Edit e) { e.q.data = static_cast<char*>(e.q.data) + 1; }, {"q", "aligned", "4"}},
      {"q_unknown_dtype", false, [](Edit e) { e.q.dtype = 99; }, {"q", "99"}},
      {"q_integer", false, [](Edit e) { e.q.dtype = LLA_I32; }, {"q", "i32", "f32"}},
      {"k_other_dtype", false, [](Edit e) { e.k.dtype = LLA_BF16; }, {"k", "bf16", "f32"}},
      {"v_other_dtype", false, [](Edit e) { e.v.dtype = LLA_F16; }, {"v", "f16", "f32"}},
      {"ridge_half", false, [](Edit e) { e.ridge.dtype = LLA_BF16; }, {"ridge", "bf16", "f32"}},
      {"ridge_double_for_float",
       false,
       [](Edit e) {
         e.ridge.dtype = LLA_F64;
         e.ridge.data = e.call.saved_in.view().data;
       },
       {"ridge", "f64", "f32"}},
      {"q_unknown_device", false, [](Edit e) { e.q.device_type = 5; }, {"q", "5"}},
      {"q_negative_device", false, [](Edit e) { e.q.device_index = -1; }, {"q", "-1"}},
      {"q_second_cpu", false, [](Edit e) { e.q.device_index = 3; }, {"q", "3"}},
      {"k_other_device", false, [](Edit e) { e.k.device_type = LLA_CUDA; }, {"k", "cuda:0", "cpu"}},
      {"ridge_other_device",
       false,
       [](Edit e) {
         e.ridge.device_type = LLA_CUDA;
         e.ridge.device_index = 1;
       },
       {"ridge", "cuda:1", "cpu"}},
      {"q_ndim", false, [](Edit e) { e.q.ndim = 3; }, {"q", "4 dimensions"}},
      {"q_too_many_dims", false, [](Edit e) { e.q.ndim = 5; }, {"q", "5", "4"}},
      {"q_negative_ndim", false, [](Edit e) { e.q.ndim = -1; }, {"q", "-1"}},
      {"packed_q_ndim", true, [](Edit e) { e.q.ndim = 2; }, {"q", "3 dimensions"}},
      {"k_dim", false, [](Edit e) { e.k.size[3] = 9; }, {"k", "(2, 7, 2, 9)", "(2, 7, 2, 8)"}},
      {"k_batch", false, [](Edit e) { e.k.size[0] = 3; }, {"k", "(3, 7, 2, 8)", "(2, 7, 2, 8)"}},
      {"v_length", false, [](Edit e) { e.v.size[1] = 8; }, {"v", "(2, 8, 2, 6)", "(2, 7, 2, 6)"}},
      {"v_heads", false, [](Edit e) { e.v.size[2] = 1; }, {"v", "(2, 7, 1, 6)", "(2, 7, 2, 6)"}},
      {"heads_not_multiple", false, [](Edit e) { e.k.size[2] = e.v.size[2] = 3; }, {"k", "3 heads", "4"}},
      {"no_key_heads", false, [](Edit e) { e.k.size[2] = e.v.size[2] = 0; }, {"k", "0 heads", "4"}},
      {"no_query_heads", false, [](Edit e) { e.q.size[2] = 0; }, {"k", "2 heads", "q has 0"}},
      {"dim_zero", false, [](Edit e) { e.q.size[3] = e.k.size[3] = 0; }, {"q", "0", "at least 1"}},
      {"value_dim_zero", false, [](Edit e) { e.v.size[3] = 0; }, {"v", "0", "at least 1"}},
      {"negative_size", false, [](Edit e) { e.q.size[1] = -5; }, {"q", "-5"}},
      {"negative_stride", false, [](Edit e) { e.v.stride[1] = -12; }, {"v", "-12"}},
      {"overflowing_product", false, [](Edit e) { e.q.size[0] = e.q.size[1] = kHuge; }, {"q", "address"}},
      {"overflowing_stride",
       false,
       [](Edit e) { e.k.stride[1] = std::numeric_limits<int64_t>::max() / 2; },
       {"k", "address"}},
      {"overflowing_rows_of_nothing",
       false,
       [](Edit e) {
         e.q.size[0] = e.k.size[0] = e.v.size[0] = kHuge;
         e.q.size[1] = kHuge;
         e.q.size[2] = 0;
         e.k.size[2] = e.v.size[2] = 0;
         e.k.size[1] = e.v.size[1] = 0;
       },
       {"q", "too large"}},
      {"ridge_heads",
       false,
       [](Edit e) {
         e.ridge.ndim = 1;
         e.ridge.size[0] = 5;
       },
       {"ridge", "(5)", "(4)", "(2, 5, 4)"}},
      {"ridge_key_heads",
       false,
       [](Edit e) {
         e.ridge.ndim = 1;
         e.ridge.size[0] = 2;
       },
       {"ridge", "(2)", "(4)"}},
      {"ridge_two_dims", false, [](Edit e) { e.ridge.ndim = 2; }, {"ridge", "(2, 5)", "(2, 5, 4)"}},
      {"ridge_key_length", false, [](Edit e) { e.ridge.size[1] = 7; }, {"ridge", "(2, 7, 4)", "(2, 5, 4)"}},
      {"ridge_dimension",
       false,
       [](Edit e) {
         e.ridge.ndim = 4;
         e.ridge.size[3] = 7;
         e.ridge.stride[3] = 1;
       },
       {"ridge", "(2, 5, 4, 7)", "(2, 5, 4, 8)"}},
      {"packed_ridge", true, [](Edit e) { e.ridge.size[0] = 9; }, {"ridge", "(9, 4)", "(10, 4)"}},
      {"scale", false, [](Edit e) { e.options.scale = std::numeric_limits<double>::infinity(); }, {"scale", "inf"}},
      {"tolerance_infinite",
       false,
       [](Edit e) { e.options.tolerance = std::numeric_limits<double>::infinity(); },
       {"tolerance", "inf"}},
      {"tolerance_negative", false, [](Edit e) { e.options.tolerance = -1; }, {"tolerance", "-1"}},
      {"window_left", false, [](Edit e) { e.options.window_left = -2; }, {"window_left", "-2"}},
      {"window_right", false, [](Edit e) { e.options.window_right = -7; }, {"window_right", "-7"}},
      {"causal", false, [](Edit e) { e.options.causal = 2; }, {"causal", "2"}},
      {"max_iterations", false, [](Edit e) { e.options.max_iterations = -4; }, {"max_iterations", "-4"}},
      {"solver", false, [](Edit e) { e.options.solver = 3; }, {"solver", "3"}},
      {"weights", false, [](Edit e) { e.options.weights = 3; }, {"weights", "3"}},
      {"cached_weights_limit",
       false,
       [](Edit e) { e.options.cached_weights_limit = -1; },
       {"cached_weights_limit", "-1"}},
      {"batch_invariant", false, [](Edit e) { e.options.batch_invariant = 2; }, {"batch_invariant", "2"}},
      {"options_newer",
       false,
       [](Edit e) { e.options.struct_size += 8; },
       {"options", "struct_size", std::to_string(sizeof(lla_options))}},
      {"options_size", false, [](Edit e) { e.options.struct_size = 0; }, {"options", "struct_size", "0"}},
      {"implementation",
       false,
       [](Edit e) { e.options.implementation = "abacus"; },
       {"implementation", "abacus", "reference"}},
  };
  return cases;
}

class BadInput : public testing::TestWithParam<SharedCase> {};

TEST_P(BadInput, ForwardIsRefused) {
  Call call(GetParam().packed);
  ForwardArgs& a = call.forward;
  GetParam().change({call, a.q, a.k, a.v, a.ridge, a.options});
  expect_refused(call, lla_forward(&a), GetParam().words);
}

TEST_P(BadInput, BackwardIsRefused) {
  Call call(GetParam().packed);
  BackwardArgs& a = call.backward;
  GetParam().change({call, a.q, a.k, a.v, a.ridge, a.options});
  expect_refused(call, lla_backward(&a), GetParam().words);
}

INSTANTIATE_TEST_SUITE_P(Cases, BadInput, testing::ValuesIn(shared_cases()),
                         [](const auto& info) { return info.param.name; });

// ---- packed sequences ----------------------------------------------------------------------------------------------

struct PackedCase {
  const char* name;
  std::vector<double> cu_q, cu_k;
  Words words;
};

class BadPacking : public testing::TestWithParam<PackedCase> {};

TEST_P(BadPacking, IsRefused) {
  Call call(true);
  const PackedCase& c = GetParam();
  const auto tensor = [&](const std::vector<double>& cu) {
    return TestTensor(call.m, "cu", DType::i32, {static_cast<int64_t>(cu.size())}, Layout::dense, cu);
  };
  const TestTensor cu_q = tensor(c.cu_q), cu_k = tensor(c.cu_k);
  call.forward.cu_seqlens_q = call.backward.cu_seqlens_q = cu_q.view();
  call.forward.cu_seqlens_k = call.backward.cu_seqlens_k = cu_k.view();
  expect_refused(call, lla_forward(&call.forward), c.words);
  expect_refused(call, lla_backward(&call.backward), c.words);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, BadPacking,
    testing::Values(PackedCase{"starts_late", {1, 4, 10}, {0, 6, 14}, {"cu_seqlens_q", "0", "1"}},
                    PackedCase{"starts_negative", {0, 4, 10}, {-1, 6, 14}, {"cu_seqlens_k", "0", "-1"}},
                    PackedCase{"decreases", {0, 6, 4}, {0, 6, 14}, {"cu_seqlens_q", "4", "6"}},
                    PackedCase{"beyond_queries", {0, 4, 11}, {0, 6, 14}, {"cu_seqlens_q", "11", "10"}},
                    PackedCase{"beyond_keys", {0, 4, 10}, {0, 6, 15}, {"cu_seqlens_k", "15", "14"}},
                    PackedCase{"middle_beyond", {0, 400, 10}, {0, 6, 14}, {"cu_seqlens_q", "400"}},
                    PackedCase{"different_counts", {0, 4, 10}, {0, 14}, {"cu_seqlens_k", "2", "3"}}),
    [](const auto& info) { return info.param.name; });

TEST(BadPackingArguments, AreRefused) {
  struct Case {
    std::function<void(ForwardArgs&)> change;
    Words words;
  };
  const std::vector<Case> cases = {
      {[](ForwardArgs& a) { a.cu_seqlens_k = {}; }, {"cu_seqlens_k", "absent"}},
      {[](ForwardArgs& a) { a.cu_seqlens_q = {}; }, {"cu_seqlens_q", "absent"}},
      {[](ForwardArgs& a) { a.cu_seqlens_q.dtype = LLA_F32; }, {"cu_seqlens_q", "f32", "i32"}},
      {[](ForwardArgs& a) { a.cu_seqlens_q.data = nullptr; }, {"cu_seqlens_q", "null"}},
      {[](ForwardArgs& a) { a.cu_seqlens_q.size[0] = 0; }, {"cu_seqlens_q", "(0)"}},
      {[](ForwardArgs& a) { a.cu_seqlens_q.stride[0] = 2; }, {"cu_seqlens_q", "2", "1"}},
      {[](ForwardArgs& a) { a.cu_seqlens_q.device_type = LLA_CUDA; }, {"cu_seqlens_q", "cuda:0", "cpu"}},
      {[](ForwardArgs& a) { a.max_seqlen_q = 3; }, {"cu_seqlens_q", "max_seqlen_q", "3", "4"}},
      {[](ForwardArgs& a) { a.max_seqlen_k = 7; }, {"cu_seqlens_k", "max_seqlen_k", "7", "8"}},
      {[](ForwardArgs& a) { a.max_seqlen_q = -1; }, {"max_seqlen_q", "-1"}},
  };
  for (const Case& c : cases) {
    Call call(true);
    c.change(call.forward);
    expect_refused(call, lla_forward(&call.forward), c.words);
  }
  Call call(false);
  call.forward.max_seqlen_k = 5;
  expect_refused(call, lla_forward(&call.forward), {"max_seqlen_k", "5", "cu_seqlens"});
}

// ---- outputs of forward --------------------------------------------------------------------------------------------

TEST(BadForward, IsRefused) {
  struct Case {
    std::function<void(Call&, ForwardArgs&)> change;
    Words words;
    lla_status code = LLA_INVALID_ARGUMENT;
  };
  const std::vector<Case> cases = {
      {[](Call&, ForwardArgs& a) { a.struct_size += 8; }, {"struct_size", std::to_string(sizeof(lla_forward_args))}},
      {[](Call&, ForwardArgs& a) { a.struct_size = 0; }, {"struct_size", "0", "lla_forward_args_init"}},
      {[](Call&, ForwardArgs& a) { a.o = {}; }, {"o", "absent"}},
      {[](Call&, ForwardArgs& a) { a.o.data = nullptr; }, {"o", "null"}},
      {[](Call&, ForwardArgs& a) { a.o.dtype = LLA_BF16; }, {"o", "bf16", "f32"}},
      {[](Call&, ForwardArgs& a) { a.o.size[3] = D; }, {"o", "(2, 5, 4, 8)", "(2, 5, 4, 6)"}},
      {[](Call&, ForwardArgs& a) { a.o.stride[0] = 0; }, {"o", "overlap", "0"}},
      {[](Call&, ForwardArgs& a) { a.o.stride[1] = 5; }, {"o", "overlap", "5"}},
      {[](Call&, ForwardArgs& a) { a.o.device_type = LLA_CUDA; }, {"o", "cuda:0", "cpu"}},
      {[](Call& c, ForwardArgs& a) { a.o.data = c.q.view().data; }, {"o", "q", "overlaps"}},
      {[](Call&, ForwardArgs& a) { a.saved.size[0] -= 1; }, {"saved", "saved_elements"}},
      {[](Call&, ForwardArgs& a) { a.saved.dtype = LLA_F64; }, {"saved", "f64", "f32"}},
      {[](Call&, ForwardArgs& a) { a.saved.data = nullptr; }, {"saved", "null"}},
      {[](Call&, ForwardArgs& a) { a.iterations.dtype = LLA_F32; }, {"iterations", "f32", "i32"}},
      {[](Call&, ForwardArgs& a) { a.residual.dtype = LLA_I32; }, {"residual", "i32", "f32"}},
      {[](Call&, ForwardArgs& a) { std::swap(a.row_status.size[1], a.row_status.size[2]); },
       {"row_status", "(2, 5, 4)", "(2, 4, 5)"}},
      {[](Call&, ForwardArgs& a) { a.residual.stride[0] = 21; }, {"residual", "21", "20"}},
      {[](Call& c, ForwardArgs& a) { a.x = c.q.view(); }, {"x", "ridge", "exactly one"}},
      {[](Call& c, ForwardArgs& a) {
         a.ridge = {};
         a.x = c.v.view();
       },
       {"x", "(2, 7, 2, 6)", "(2, 5, 4, 8)"}},
      {[](Call& c, ForwardArgs& a) {
         a.ridge = {};
         a.x = c.q.view();
         a.x.dtype = LLA_F16;
       },
       {"x", "f16", "f32"}},
  };
  for (const Case& c : cases) {
    Call call(false);
    c.change(call, call.forward);
    expect_refused(call, lla_forward(&call.forward), c.words, c.code);
  }
}

TEST(BadForward, NullArguments) {
  EXPECT_EQ(lla_forward(nullptr), LLA_INVALID_ARGUMENT);
  EXPECT_STRNE(lla_last_error(), "");
  EXPECT_EQ(lla_backward(nullptr), LLA_INVALID_ARGUMENT);
  Call call(false);
  EXPECT_EQ(lla_forward_query(&call.forward, nullptr), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(lla_forward_query(nullptr, nullptr), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(lla_backward_query(&call.backward, nullptr), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(lla_cache_append(nullptr), LLA_INVALID_ARGUMENT);
  EXPECT_EQ(lla_forward_plan(&call.forward, nullptr, 10), LLA_INVALID_ARGUMENT);
  char text[1];
  EXPECT_EQ(lla_forward_plan(&call.forward, text, 0), LLA_INVALID_ARGUMENT);
}

// ---- outputs of backward -------------------------------------------------------------------------------------------

TEST(BadBackward, IsRefused) {
  struct Case {
    std::function<void(Call&, BackwardArgs&)> change;
    Words words;
  };
  const std::vector<Case> cases = {
      {[](Call&, BackwardArgs& a) { a.struct_size += 8; }, {"struct_size", std::to_string(sizeof(lla_backward_args))}},
      {[](Call&, BackwardArgs& a) { a.saved = {}; }, {"saved", "absent"}},
      {[](Call&, BackwardArgs& a) { a.saved.size[0] += 4; }, {"saved", "saved_elements"}},
      {[](Call&, BackwardArgs& a) { a.saved.data = nullptr; }, {"saved", "null"}},
      {[](Call&, BackwardArgs& a) { a.grad_o = {}; }, {"grad_o", "absent"}},
      {[](Call&, BackwardArgs& a) { a.grad_o.data = nullptr; }, {"grad_o", "null"}},
      {[](Call&, BackwardArgs& a) { a.grad_o.size[1] = Lk; }, {"grad_o", "(2, 7, 4, 6)", "(2, 5, 4, 6)"}},
      {[](Call&, BackwardArgs& a) { a.grad_o.dtype = LLA_BF16; }, {"grad_o", "bf16", "f32"}},
      {[](Call&, BackwardArgs& a) { a.dq.size[3] = Dv; }, {"dq", "(2, 5, 4, 6)", "(2, 5, 4, 8)"}},
      {[](Call&, BackwardArgs& a) { a.dk.size[2] = 1; }, {"dk", "(2, 7, 1, 8)", "(2, 7, 2, 8)"}},
      {[](Call&, BackwardArgs& a) { a.dv.size[1] = Lq; }, {"dv", "(2, 5, 2, 6)", "(2, 7, 2, 6)"}},
      {[](Call&, BackwardArgs& a) { a.dk.dtype = LLA_F16; }, {"dk", "f16", "f32"}},
      {[](Call&, BackwardArgs& a) { a.dq.stride[2] = 0; }, {"dq", "overlap", "0"}},
      {[](Call&, BackwardArgs& a) { a.dv.data = nullptr; }, {"dv", "null"}},
      {[](Call& c, BackwardArgs& a) { a.dk.data = c.k.view().data; }, {"dk", "overlaps", "k"}},
      {[](Call& c, BackwardArgs& a) { a.dk.data = c.dq.view().data; }, {"dk", "overlaps", "dq"}},
      {[](Call&, BackwardArgs& a) { a.dridge.ndim = 0; }, {"dridge", "()", "(2, 5, 4)"}},
      {[](Call&, BackwardArgs& a) { a.dridge.dtype = LLA_BF16; }, {"dridge", "bf16", "f32"}},
      {[](Call&, BackwardArgs& a) { a.dridge.stride[2] = 0; }, {"dridge", "overlap"}},
      {[](Call& c, BackwardArgs& a) { a.dx = c.dq.view(); }, {"dx", "ridge"}},
      {[](Call& c, BackwardArgs& a) {
         a.ridge = {};
         a.x = c.q.view();
       },
       {"dridge", "x"}},
  };
  for (const Case& c : cases) {
    Call call(false);
    c.change(call, call.backward);
    expect_refused(call, lla_backward(&call.backward), c.words);
  }
}

// ---- workspace and device ------------------------------------------------------------------------------------------

TEST(Workspace, TooSmallMissingOrMisalignedIsRefused) {
  for (const std::string& name : implementations_under_test()) {
    Call call(false);
    call.forward.options.implementation = call.backward.options.implementation = name.c_str();
    if (&memory_of(name) != &host_memory()) continue;
    for (const bool backward : {false, true}) {
      size_t bytes = 0;
      ASSERT_TRUE(backward ? workspace_bytes(call.backward, bytes) : workspace_bytes(call.forward, bytes))
          << lla_last_error();
      const auto run = [&](void* memory, size_t size) {
        call.forward.workspace = call.backward.workspace = memory;
        call.forward.workspace_bytes = call.backward.workspace_bytes = size;
        return backward ? lla_backward(&call.backward) : lla_forward(&call.forward);
      };
      auto* const memory = static_cast<uint8_t*>(call.workspace.data());
      if (bytes > 0) {
        expect_refused(call, run(memory, bytes - 1), {"workspace", std::to_string(bytes), std::to_string(bytes - 1)},
                       LLA_WORKSPACE_TOO_SMALL);
        expect_refused(call, run(nullptr, bytes), {"workspace", "null"});
      }
      expect_refused(call, run(memory + 16, bytes), {"workspace", "256"});
    }
  }
}

TEST(Device, CudaTensorsWithoutCudaAreUnsupportedWithEachReason) {
  if (cuda_memory() != nullptr) GTEST_SKIP() << "this machine has CUDA";
  Call call(false);
  ForwardArgs& a = call.forward;
  for (lla_tensor* t : {&a.q, &a.k, &a.v, &a.ridge, &a.o, &a.saved, &a.iterations, &a.residual, &a.row_status})
    t->device_type = LLA_CUDA;
  expect_refused(call, lla_forward(&a), {"reference", "CUDA"}, LLA_UNSUPPORTED);
  char text[1024];
  ASSERT_EQ(lla_forward_explain(&a, text, sizeof(text)), LLA_OK);
  EXPECT_NE(std::string(text).find("reference: no, "), std::string::npos) << text;
}

TEST(LastError, IsClearedBySuccessAndKeptPerThread) {
  Call call(false);
  call.forward.o.size[3] = 99;
  ASSERT_NE(lla_forward(&call.forward), LLA_OK);
  EXPECT_STRNE(lla_last_error(), "");
  call.forward.o.size[3] = Dv;
  ASSERT_EQ(lla_forward(&call.forward), LLA_OK) << lla_last_error();
  EXPECT_STREQ(lla_last_error(), "");
}

TEST(Base, TheUnchangedCallsAreLegal) {
  for (const bool packed : {false, true}) {
    Call call(packed);
    EXPECT_EQ(lla_forward(&call.forward), LLA_OK) << lla_last_error();
    EXPECT_EQ(lla_backward(&call.backward), LLA_OK) << lla_last_error();
  }
}

}  // namespace
}  // namespace lla::test
