// Items over threads, for what is not already inside a library call. Which thread takes an item must not matter to its
// result.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace lla::experiments {

// f(item, worker) for item in [0, count); worker in [0, threads) lets the caller keep scratch per thread.
template <class F>
void parallel_for(int64_t count, int threads, F&& f) {
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex guard;
  const auto work = [&](int worker) {
    try {
      for (int64_t i; (i = next.fetch_add(1)) < count;) f(i, worker);
    } catch (...) {
      const std::lock_guard lock(guard);
      error = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads && t < count; ++t) others.emplace_back(work, t);
  work(0);
  for (auto& thread : others) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace lla::experiments
