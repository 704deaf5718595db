#include "cpu/thread_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cpu/cpu.hpp"

namespace lla::cpu {
namespace {

TEST(ThreadPool, RunsEveryItemOnceWithASlotToItself) {
  for (const int workers : {1, 2, 5}) {
    constexpr int64_t items = 1000;
    std::vector<int> runs(items, 0);
    std::vector<std::atomic<int>> inside(workers);
    parallel_for(items, workers, [&](int64_t item, int worker) {
      ASSERT_LT(worker, workers);
      EXPECT_EQ(inside[worker].fetch_add(1), 0);
      ++runs[item];
      inside[worker].fetch_sub(1);
    });
    for (int n : runs) EXPECT_EQ(n, 1);
  }
}

TEST(ThreadPool, ServesSeveralCallersAtOnce) {
  constexpr int callers = 4;
  std::vector<int64_t> sums(callers, 0);
  std::vector<std::thread> threads;
  for (int c = 0; c < callers; ++c) {
    threads.emplace_back([&sums, c] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<int64_t> values(64, 0);
        parallel_for(64, 3, [&](int64_t item, int) { values[item] = item; });
        for (int64_t v : values) sums[c] += v;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (int64_t sum : sums) EXPECT_EQ(sum, 50 * 64 * 63 / 2);
}

TEST(ThreadPool, NoItemsIsNoWork) {
  parallel_for(0, 4, [](int64_t, int) { FAIL(); });
}

TEST(Threads, CanBeSetAndRestored) {
  const int before = num_threads();
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), before);
}

}  // namespace
}  // namespace lla::cpu
