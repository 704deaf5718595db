#include "cpu/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "core/float_environment.hpp"
#include "core/text.hpp"
#include "cpu/cpu.hpp"

namespace lla::cpu {
namespace {

// What LLA_NUM_THREADS says: -1 where it is no number of threads, 0 where it is not set, empty or 0.
int environment_threads() {
  const char* text = std::getenv("LLA_NUM_THREADS");
  if (text == nullptr || *text == '\0') return 0;
  const char* end = text + std::strlen(text);
  int wanted = 0;
  const auto [stopped, error] = std::from_chars(text, end, wanted);
  if (*text == '-' || stopped != end || error == std::errc::invalid_argument) return -1;
  return error == std::errc::result_out_of_range ? kMaxThreads : std::min(wanted, kMaxThreads);
}

int default_threads() {
  if (const int wanted = environment_threads(); wanted > 0) return wanted;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int> wanted_threads{0};  // 0: not asked for, the default counts

struct Job {
  int64_t items;
  int seats;
  detail::ItemFunction function;
  void* context;
  std::atomic<int64_t> next{0};
  // Guarded by the pool's mutex.
  int joined = 1;         // seats handed out, the caller's included
  int working = 0;        // pool threads inside
  Job* behind = nullptr;  // the next in the pool's list: made of the jobs themselves, so that a call allocates nothing

  void work(int worker) {
    for (;;) {
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      function(context, item, worker);
    }
  }
  bool open() const { return joined < seats && next.load(std::memory_order_relaxed) < items; }
};

class Pool {
 public:
  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      grow(job.seats - 1);
      Job** last = &jobs_;
      while (*last != nullptr) last = &(*last)->behind;
      *last = &job;
    }
    wake_.notify_all();
    job.work(0);
    std::unique_lock lock(mutex_);
    Job** link = &jobs_;
    while (*link != &job) link = &(*link)->behind;
    *link = job.behind;
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
    } catch (const std::bad_alloc&) {
    }
  }

  void serve() {
    const core::FloatEnvironment floats;  // a thread begins with that of whoever started it
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* found = jobs_;
      while (found != nullptr && !found->open()) found = found->behind;
      if (found == nullptr) {
        wake_.wait(lock);
        continue;
      }
      Job& job = *found;
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
  Job* jobs_ = nullptr;  // the first, longest there
  int helpers_ = 0;
};

// Never destroyed: its threads may still wait on it while the process exits.
std::atomic<Pool*> current_pool{nullptr};

// A forked child has a copy of the pool but none of its threads, and the copied mutex may be locked by one of them for
// ever. The copy is left alone; the child's first call makes a pool of its own.
void forget_pool() { current_pool.store(nullptr, std::memory_order_relaxed); }

Pool& pool() {
  if (Pool* made = current_pool.load(std::memory_order_acquire)) return *made;
  static std::atomic<bool> registered{false};  // a child inherits the handler
  if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, forget_pool);
  Pool* const mine = new Pool;
  Pool* first = nullptr;
  if (current_pool.compare_exchange_strong(first, mine, std::memory_order_acq_rel)) return *mine;
  delete mine;  // another thread was quicker; this one has no threads yet
  return *first;
}

}  // namespace

namespace detail {

void run_items(int64_t items, int workers, ItemFunction function, void* context) {
  const int seats = static_cast<int>(std::min<int64_t>(workers, items));
  if (seats <= 1) {
    for (int64_t item = 0; item < items; ++item) function(context, item, 0);
    return;
  }
  Job job{items, seats, function, context};
  pool().run(job);
}

}  // namespace detail

int num_threads() {
  const int wanted = wanted_threads.load(std::memory_order_relaxed);
  if (wanted > 0) return wanted;
  // The environment is read once. (No static with a guard: a fork could leave it locked in the child.)
  static std::atomic<int> standard{0};
  int threads = standard.load(std::memory_order_relaxed);
  if (threads == 0) standard.store(threads = default_threads(), std::memory_order_relaxed);
  return threads;
}

Status check_environment() {
  if (wanted_threads.load(std::memory_order_relaxed) > 0 || environment_threads() >= 0) return {};
  return core::invalid(core::cat("LLA_NUM_THREADS: \"", std::getenv("LLA_NUM_THREADS"),
                                 "\" is not a number of threads; unset it, or give a whole number"));
}

void set_num_threads(int threads) {
  wanted_threads.store(std::clamp(threads, 0, kMaxThreads), std::memory_order_relaxed);
}

}  // namespace lla::cpu
