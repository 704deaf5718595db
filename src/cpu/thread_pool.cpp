#include "cpu/thread_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

#include "cpu/cpu.hpp"

namespace lla::cpu {
namespace {

constexpr int kMaxThreads = 1024;

int default_threads() {
  if (const char* text = std::getenv("LLA_NUM_THREADS")) {
    const int wanted = std::atoi(text);
    if (wanted > 0) return std::min(wanted, kMaxThreads);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int> wanted_threads{0};  // 0: not asked for, the default counts

struct Job {
  int64_t items;
  int slots;
  detail::ItemFunction function;
  void* context;
  std::atomic<int64_t> next{0};
  int joined = 1;   // slots handed out, the caller's included; guarded by the pool's mutex
  int working = 0;  // pool threads inside; guarded by the pool's mutex

  void work(int worker) {
    for (;;) {
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      function(context, item, worker);
    }
  }
  bool open() const { return joined < slots && next.load(std::memory_order_relaxed) < items; }
};

class Pool {
 public:
  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      grow(job.slots - 1);
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    job.work(0);
    std::unique_lock lock(mutex_);
    jobs_.remove(&job);
    done_.wait(lock, [&] { return job.working == 0; });
  }

 private:
  // A thread that cannot be started is no failure: the caller does the work alone.
  void grow(int helpers) {
    try {
      while (helpers_ < helpers) {
        std::thread([this] { serve(); }).detach();
        ++helpers_;
      }
    } catch (const std::system_error&) {
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* j) { return j->open(); });
      if (found == jobs_.end()) {
        wake_.wait(lock);
        continue;
      }
      Job& job = **found;
      const int worker = job.joined++;
      ++job.working;
      lock.unlock();
      job.work(worker);
      lock.lock();
      if (--job.working == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::list<Job*> jobs_;
  int helpers_ = 0;
};

// Never destroyed: its threads may still wait on it while the process exits.
Pool& pool() {
  static Pool* const instance = new Pool;
  return *instance;
}

}  // namespace

namespace detail {

void run_items(int64_t items, int workers, ItemFunction function, void* context) {
  const int slots = static_cast<int>(std::min<int64_t>(workers, items));
  if (slots <= 1) {
    for (int64_t item = 0; item < items; ++item) function(context, item, 0);
    return;
  }
  Job job{items, slots, function, context};
  pool().run(job);
}

}  // namespace detail

int num_threads() {
  const int wanted = wanted_threads.load(std::memory_order_relaxed);
  if (wanted > 0) return wanted;
  static const int standard = default_threads();
  return standard;
}

void set_num_threads(int threads) {
  wanted_threads.store(std::clamp(threads, 0, kMaxThreads), std::memory_order_relaxed);
}

}  // namespace lla::cpu
