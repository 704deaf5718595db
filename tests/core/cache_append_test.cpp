// lla_cache_append: every token lands where lengths and pages, or slots, say; what does not fit changes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "support/compare.hpp"
#include "support/run.hpp"

namespace lla::test {
namespace {

constexpr int64_t kHeads = 2, kDim = 3, kValueDim = 5;

// New tokens for two sequences and a cache of three pages of four, or two sequences of six; the cache holds -1.
struct Append {
  Memory& m;
  DType dtype;
  bool paged;
  TestTensor k, v, k_cache, v_cache, lengths, table, slots, cu, status, new_lengths;
  CacheAppendArgs args;

  Append(DType dtype, Layout layout, bool paged, bool packed, std::vector<double> before = {3, 1},
         std::vector<double> pages = {2, 0, 1, -1}, Memory& memory = host_memory())
      : m(memory), dtype(dtype), paged(paged) {
    const auto size = [&](int64_t width) -> std::vector<int64_t> {
      if (packed) return {4, kHeads, width};
      return {2, 2, kHeads, width};
    };
    const auto filled = [&](const std::vector<int64_t>& of, double from) {
      int64_t n = 1;
      for (int64_t s : of) n *= s;
      std::vector<double> values(static_cast<size_t>(n));
      for (size_t i = 0; i < values.size(); ++i) values[i] = from + static_cast<double>(i);
      return values;
    };
    const int64_t first = paged ? 3 : 2, second = paged ? 4 : 6;
    k = TestTensor(m, "k", dtype, size(kDim), layout, filled(size(kDim), 1));
    v = TestTensor(m, "v", dtype, size(kValueDim), layout, filled(size(kValueDim), 100));
    k_cache = TestTensor(m, "k_cache", dtype, {first, second, kHeads, kDim}, layout);
    v_cache = TestTensor(m, "v_cache", dtype, {first, second, kHeads, kValueDim}, layout);
    lengths = TestTensor(m, "seqlens", DType::i32, {2}, Layout::dense, before);
    if (paged) table = TestTensor(m, "page_table", DType::i32, {2, 2}, Layout::dense, pages);
    if (packed) cu = TestTensor(m, "cu_seqlens", DType::i32, {3}, Layout::dense, {0, 1, 4});
    status = TestTensor(m, "status", DType::i32, {2});
    args.k = k.view(), args.v = v.view(), args.k_cache = k_cache.view(), args.v_cache = v_cache.view();
    args.seqlens = lengths.view(), args.page_table = table.view(), args.cu_seqlens = cu.view();
    args.status = status.view();
    new_lengths = TestTensor(m, "new_seqlens", DType::i32, {2});
    args.new_seqlens = new_lengths.view();
  }

  // Whether the token's keys and values are at (page, slot).
  void expect_at(int64_t token, int64_t page, int64_t slot) const {
    const int64_t slots = paged ? 4 : 6;
    const auto part = [](const TestTensor& t, int64_t row, int64_t width) {
      const std::vector<double> all = t.values();
      return std::vector<double>(all.begin() + row * width, all.begin() + (row + 1) * width);
    };
    EXPECT_EQ(part(k_cache, page * slots + slot, kHeads * kDim), part(k, token, kHeads * kDim)) << "token " << token;
    EXPECT_EQ(part(v_cache, page * slots + slot, kHeads * kValueDim), part(v, token, kHeads * kValueDim));
  }
  int64_t written() const {
    int64_t n = 0;
    for (const double x : k_cache.values()) n += !std::isnan(x);
    return n / (kHeads * kDim);
  }
  void expect_intact() const {
    for (const TestTensor* t : {&k, &v, &k_cache, &v_cache, &lengths, &table, &cu, &status, &new_lengths})
      t->expect_intact();
  }
};

TEST(CacheAppend, TokensFollowLengthsAndPages) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const Layout layout : {Layout::dense, Layout::head_major, Layout::padded, Layout::scattered}) {
      Append contiguous(dtype, layout, false, false);
      ASSERT_TRUE(cache_append(contiguous.args)) << lla_last_error();
      contiguous.expect_at(0, 0, 3), contiguous.expect_at(1, 0, 4);
      contiguous.expect_at(2, 1, 1), contiguous.expect_at(3, 1, 2);
      EXPECT_EQ(contiguous.written(), 4);
      EXPECT_EQ(contiguous.status.values(), (std::vector<double>{LLA_ROW_OK, LLA_ROW_OK}));
      EXPECT_EQ(contiguous.new_lengths.values(), (std::vector<double>{5, 3}));
      contiguous.expect_intact();

      Append paged(dtype, layout, true, false);  // sequence 0 in pages 2, 0; sequence 1 in page 1
      ASSERT_TRUE(cache_append(paged.args)) << lla_last_error();
      paged.expect_at(0, 2, 3), paged.expect_at(1, 0, 0), paged.expect_at(2, 1, 1), paged.expect_at(3, 1, 2);
      EXPECT_EQ(paged.written(), 4);
      paged.expect_intact();

      Append packed(dtype, layout, true, true);  // one token and three
      ASSERT_TRUE(cache_append(packed.args)) << lla_last_error();
      packed.expect_at(0, 2, 3), packed.expect_at(1, 1, 1), packed.expect_at(2, 1, 2), packed.expect_at(3, 1, 3);
      EXPECT_EQ(packed.new_lengths.values(), (std::vector<double>{4, 4}));
      packed.expect_intact();
    }
  }
}

TEST(CacheAppend, TokensFollowSlots) {
  for (const bool packed : {false, true}) {
    Append call(DType::f32, Layout::padded, true, packed);
    int64_t slots[] = {11, -1, 0, 6};
    int32_t status[4] = {9, 9, 9, 9};
    call.args.slots = packed ? dense(slots, DType::i64, {4}) : dense(slots, DType::i64, {2, 2});
    call.args.status = packed ? dense(status, DType::i32, {4}) : dense(status, DType::i32, {2, 2});
    call.args.seqlens = call.args.page_table = call.args.cu_seqlens = call.args.new_seqlens = {};
    ASSERT_TRUE(cache_append(call.args)) << lla_last_error();
    call.expect_at(0, 2, 3), call.expect_at(2, 0, 0), call.expect_at(3, 1, 2);
    EXPECT_EQ(call.written(), 3);
    for (const int32_t s : status) EXPECT_EQ(s, LLA_ROW_OK);
    call.expect_intact();
  }
}

// Without tokens nothing is written, and slots may be a null pointer, as those of a tensor without elements are.
TEST(CacheAppend, NoTokensAndNoSlots) {
  for (const bool packed : {false, true}) {
    Append call(DType::f32, Layout::dense, true, packed);
    call.args.k.size[packed ? 0 : 1] = call.args.v.size[packed ? 0 : 1] = 0;
    call.args.slots = packed ? dense(nullptr, DType::i64, {0}) : dense(nullptr, DType::i64, {2, 0});
    call.args.seqlens = call.args.page_table = call.args.cu_seqlens = {};
    call.args.status = call.args.new_seqlens = {};
    ASSERT_TRUE(cache_append(call.args)) << lla_last_error();
    EXPECT_EQ(call.written(), 0);
  }
}

TEST(CacheAppend, WhatDoesNotFitIsRefusedAndNothingWritten) {
  static int64_t slots[4];
  const auto with_slots = [](Append& c, std::initializer_list<int64_t> values) {
    std::copy(values.begin(), values.end(), slots);
    c.args.slots = dense(slots, DType::i64, {2, 2});
    c.args.seqlens = c.args.page_table = c.args.status = c.args.new_seqlens = {};
  };
  struct Case {
    bool paged;
    std::vector<double> before, pages;
    std::function<void(Append&)> change;
    std::vector<std::string> words;
  };
  const auto nothing = [](Append&) {};
  const std::vector<Case> cases = {
      {false, {3, 5}, {}, nothing, {"seqlens", "sequence 1", "5", "6"}},
      {false, {-1, 1}, {}, nothing, {"seqlens", "sequence 0", "-1"}},
      {false, {INT32_MAX, 1}, {}, nothing, {"seqlens", "sequence 0"}},
      {true, {3, 7}, {2, 0, 1, 1}, nothing, {"seqlens", "sequence 1", "7", "8"}},
      {true, {3, 1}, {2, -1, 1, -1}, nothing, {"page_table", "sequence 0", "-1"}},
      {true, {3, 1}, {2, 3, 1, -1}, nothing, {"page_table", "page 3", "0 to 2"}},
      {true, {3, 3}, {2, 0, 2, 1}, nothing, {"page_table", "slot 3", "page 2"}},
      {true,
       {3, 1},
       {2, 0, 1, -1},
       [&](Append& c) {
         with_slots(c, {0, 1, 2, 12});
       },
       {"slots", "token 3", "12", "11"}},
      {true,
       {3, 1},
       {2, 0, 1, -1},
       [&](Append& c) {
         with_slots(c, {0, -2, 2, 3});
       },
       {"slots", "-2"}},
      {true,
       {3, 1},
       {2, 0, 1, -1},
       [&](Append& c) {
         with_slots(c, {5, 1, -1, 5});
       },
       {"slots", "slot 1", "page 1"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.slots = c.args.seqlens; }, {"slots", "seqlens", "one"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.seqlens = {}; }, {"seqlens", "slots"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.v_cache.dtype = LLA_F64; }, {"v_cache", "f64", "f32"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.v_cache.size[1] = 2; }, {"v_cache", "(3, 2"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.k_cache.stride[0] = 0; }, {"k_cache", "overlap"}},
      {true,
       {3, 1},
       {2, 0, 1, -1},
       [](Append& c) { c.args.v.data = c.args.k_cache.data; },
       {"k_cache", "overlaps", "v"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.struct_size += 8; }, {"struct_size"}},
      {true,
       {3, 1},
       {2, 0, 1, -1},
       [](Append& c) { c.args.new_seqlens.data = c.args.seqlens.data; },
       {"new_seqlens", "overlaps", "seqlens"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.new_seqlens.size[0] = 1; }, {"new_seqlens", "(1)", "(2)"}},
      {true,
       {3, 1},
       {2, 0, 1, -1},
       [&](Append& c) {
         with_slots(c, {5, 1, -1, 6});
         c.args.new_seqlens = c.new_lengths.view();
       },
       {"new_seqlens", "slots"}},
      {true, {3, 1}, {2, 0, 1, -1}, [](Append& c) { c.args.v.size[1] = 1; }, {"v", "(2, 1, 2, 5)"}},
  };
  for (const Case& c : cases) {
    Append call(DType::f32, Layout::dense, c.paged, false, c.before, c.pages);
    c.change(call);
    EXPECT_EQ(cache_append(call.args).code(), LLA_INVALID_ARGUMENT);
    for (const std::string& word : c.words) {
      EXPECT_NE(std::string(lla_last_error()).find(word), std::string::npos) << word << ": " << lla_last_error();
    }
    call.k_cache.expect_untouched();
    call.v_cache.expect_untouched();
    call.status.expect_untouched();
    call.new_lengths.expect_untouched();
  }
}

}  // namespace
}  // namespace lla::test
