// lla_cache_append on a GPU, where lengths, pages and slots are read on the device: what does not fit writes nothing
// and says so, and nothing else changes.
#include <gtest/gtest.h>

#include <cmath>

#include "core/text.hpp"
#include "gpu/gpu_test.hpp"
#include "support/run.hpp"

namespace lla::test {
namespace {

constexpr int64_t kHeads = 2, kDim = 3, kValueDim = 5, kPages = 6, kPageSize = 4, kNew = 3;

std::vector<double> counted(int64_t n, double from) {
  std::vector<double> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = from + static_cast<double>(i % 97);
  return values;
}

struct Append {
  Memory& m = *cuda_memory();
  DType dtype;
  TestTensor k, v, k_cache, v_cache, lengths, table, slots, status, new_lengths;
  CacheAppendArgs args;

  Append(DType dtype, Layout layout, const std::vector<double>& before, const std::vector<double>& pages)
      : dtype(dtype) {
    const auto batch = static_cast<int64_t>(before.size());
    describe(batch, layout);
    lengths = TestTensor(m, "seqlens", DType::i32, {batch}, Layout::dense, before);
    table = TestTensor(m, "page_table", DType::i32, {batch, static_cast<int64_t>(pages.size()) / batch}, Layout::dense,
                       pages);
    status = TestTensor(m, "status", DType::i32, {batch});
    new_lengths = TestTensor(m, "new_seqlens", DType::i32, {batch});
    args.seqlens = lengths.view(), args.page_table = table.view(), args.status = status.view();
    args.new_seqlens = new_lengths.view();
  }
  Append(DType dtype, int64_t batch, TestTensor given) : dtype(dtype), slots(std::move(given)) {
    describe(batch, Layout::padded);
    status = TestTensor(m, "status", DType::i32, {batch, kNew});
    args.slots = slots.view(), args.status = status.view();
  }

  void describe(int64_t batch, Layout layout) {
    k = TestTensor(m, "k", dtype, {batch, kNew, kHeads, kDim}, layout, counted(batch * kNew * kHeads * kDim, 1));
    v = TestTensor(m, "v", dtype, {batch, kNew, kHeads, kValueDim}, layout,
                   counted(batch * kNew * kHeads * kValueDim, 100));
    k_cache = TestTensor(m, "k_cache", dtype, {kPages, kPageSize, kHeads, kDim}, layout);
    v_cache = TestTensor(m, "v_cache", dtype, {kPages, kPageSize, kHeads, kValueDim}, layout);
    args.k = k.view(), args.v = v.view(), args.k_cache = k_cache.view(), args.v_cache = v_cache.view();
  }

  // The slots that hold something, each with the token it holds: -1 where it is none of the new ones.
  std::vector<std::pair<int64_t, int64_t>> written() const {
    const std::vector<double> cache = k_cache.values(), values = v_cache.values(), keys = k.values(), news = v.values();
    const int64_t tokens = static_cast<int64_t>(keys.size()) / (kHeads * kDim);
    const auto row = [](const std::vector<double>& t, int64_t i, int64_t width) {
      return std::vector<double>(t.begin() + i * width, t.begin() + (i + 1) * width);
    };
    std::vector<std::pair<int64_t, int64_t>> found;
    for (int64_t slot = 0; slot < kPages * kPageSize; ++slot) {
      if (std::isnan(cache[static_cast<size_t>(slot * kHeads * kDim)])) continue;
      int64_t token = -1;
      for (int64_t t = 0; t < tokens; ++t) {
        if (row(cache, slot, kHeads * kDim) == row(keys, t, kHeads * kDim) &&
            row(values, slot, kHeads * kValueDim) == row(news, t, kHeads * kValueDim))
          token = t;
      }
      found.emplace_back(slot, token);
    }
    return found;
  }

  void run() {
    ASSERT_TRUE(cache_append(args)) << lla_last_error();
    m.synchronize();
    for (const TestTensor* t : {&k, &v, &k_cache, &v_cache, &lengths, &table, &slots, &status, &new_lengths})
      t->expect_intact();
  }
};

class GpuCacheAppend : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  }
};

TEST_F(GpuCacheAppend, ASequenceThatDoesNotFitWritesNothing) {
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    for (const Layout layout : {Layout::dense, Layout::head_major, Layout::padded, Layout::scattered}) {
      // Fits over two pages; too long; negative; a page that is not there, in its second entry; fits.
      Append call(dtype, layout, {3, 6, -1, 2, 0}, {5, 2, 0, 1, 0, 1, 3, 6, 4, -1});
      call.run();
      const std::vector<std::pair<int64_t, int64_t>> want = {{8, 1}, {9, 2}, {16, 12}, {17, 13}, {18, 14}, {23, 0}};
      EXPECT_EQ(call.written(), want) << core::name(dtype);
      EXPECT_EQ(call.status.values(),
                (std::vector<double>{LLA_ROW_OK, LLA_ROW_INVALID, LLA_ROW_INVALID, LLA_ROW_INVALID, LLA_ROW_OK}));
      // Of the page that is not there a call over the cache says so itself.
      EXPECT_EQ(call.new_lengths.values(), (std::vector<double>{6, -1, -1, 5, 3}));
    }
  }
}

TEST_F(GpuCacheAppend, ASlotThatIsNoneIsSkipped) {
  Memory& m = *cuda_memory();
  const std::vector<int64_t> slots = {0, -1, 23, 24, -2, int64_t{1} << 40};
  // TestTensor stores numbers of the types it knows; these are 64 bits wide.
  std::unique_ptr<GuardedBuffer> memory = std::make_unique<GuardedBuffer>(m, slots.size() * 8);
  m.write(memory->data(), slots.data(), slots.size() * 8);
  Append call(DType::bf16, 2, TestTensor());
  call.args.slots = dense(memory->data(), DType::i64, {2, kNew}, m.cuda_device());
  call.run();
  const std::vector<std::pair<int64_t, int64_t>> want = {{0, 0}, {23, 2}};
  EXPECT_EQ(call.written(), want);
  EXPECT_EQ(call.status.values(), (std::vector<double>{LLA_ROW_OK, LLA_ROW_OK, LLA_ROW_OK, LLA_ROW_INVALID,
                                                       LLA_ROW_INVALID, LLA_ROW_INVALID}));
}

TEST_F(GpuCacheAppend, HostPointersAreRefused) {
  Append call(DType::f32, Layout::dense, {0}, {0, 1});
  static int32_t host_lengths[1] = {0};
  call.args.seqlens.data = host_lengths;
  EXPECT_EQ(cache_append(call.args).code(), LLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(lla_last_error()).find("seqlens"), std::string::npos) << lla_last_error();
}

}  // namespace
}  // namespace lla::test
