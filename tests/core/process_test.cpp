// The library among processes: forked children, calls while the process ends, the environment, a library unloaded.
//
// What ends a process is tried in processes of its own: this program, started again with the name of what to try.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "lla/lla.hpp"
#include "support/run.hpp"

#if defined(__SANITIZE_THREAD__)
constexpr bool kForksAllowed = false;  // the sanitizer gives up in a forked child that starts threads
#else
constexpr bool kForksAllowed = true;
#endif

namespace {

// One call, large enough for four threads, with memory of its own.
struct Call {
  static constexpr int64_t kLength = 192, kHeads = 2, kDim = 64;
  std::vector<float> data, o;
  float ridge = 0.3f;
  lla::ForwardArgs args;
  lla_status question = LLA_INTERNAL;

  Call() : data(3 * kLength * kHeads * kDim), o(kLength * kHeads * kDim) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = std::sin(static_cast<float>(i % 1009));
    const auto tensor = [&](float* at) { return lla::dense(at, lla::DType::f32, {1, kLength, kHeads, kDim}); };
    args.q = tensor(data.data());
    args.k = tensor(data.data() + o.size());
    args.v = tensor(data.data() + 2 * o.size());
    args.o = tensor(o.data());
    args.ridge = lla::scalar(&ridge);
    question = workspace_bytes(args, args.workspace_bytes).code();
    if (question == LLA_OK) args.workspace = std::aligned_alloc(256, (args.workspace_bytes + 255) / 256 * 256);
  }
  ~Call() { std::free(args.workspace); }
  lla_status run() const { return lla_forward(&args); }
};

// ---- memory that runs out ------------------------------------------------------------------------------------------

// Allocations of this thread that still succeed; negative: all do.
thread_local int allocations_left = -1;

}  // namespace

// Static linking makes these the library's, too.
__attribute__((noinline)) void* operator new(size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

// ---- what is tried in a process of its own -------------------------------------------------------------------------

Call* exit_call = nullptr;

struct CallsAtExit {
  ~CallsAtExit() {
    if (exit_call == nullptr) return;
    // A refused call too: its message goes where the thread's destructors have already been.
    if (exit_call->run() != LLA_OK || lla_forward(nullptr) == LLA_OK || *lla_last_error() == '\0' ||
        *lla_machine_description() == '\0' || lla_implementation_name(0) == nullptr)
      _exit(3);
  }
} calls_at_exit;

// Before main, and before any constructor of the library's (should it have one).
int called_before_main = 9;
__attribute__((constructor(101))) void call_before_main() {
  const char* wanted = std::getenv("LLA_PROBE_EARLY");
  if (wanted == nullptr) return;
  lla_set_num_threads(4);
  const Call call;
  called_before_main = call.question == LLA_OK && call.run() == LLA_OK && lla_forward(nullptr) != LLA_OK &&
                               *lla_last_error() != '\0' && *lla_machine_description() != '\0'
                           ? 0
                           : 2;
}

int probe(const std::string& what) {
  if (what == "static") {
    lla_set_num_threads(4);
    exit_call = new Call;
    return exit_call->run();
  }
  if (what == "threads") {  // still computing while the process ends
    lla_set_num_threads(4);
    for (int i = 0; i < 3; ++i) {
      std::thread([] {
        const Call call;
        for (;;) call.run();
      }).detach();
    }
    usleep(50000);
    return 0;
  }
  if (what == "early") return called_before_main;
  if (what == "environment") {  // 0: taken; 1: refused, and by name
    const Call call;
    if (call.question == LLA_OK) return call.run() == LLA_OK ? 0 : 2;
    const std::string message = lla_last_error();
    if (call.question != LLA_INVALID_ARGUMENT || message.rfind("LLA_NUM_THREADS: ", 0) != 0) return 2;
    lla_set_num_threads(2);  // a number that was set needs none from the environment
    return Call().question == LLA_OK ? 1 : 2;
  }
  if (what == "unload") {  // a plugin host lets go of the library; its threads are still there
    void* library = dlopen(LLA_SHARED_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return 2;
    const auto set_threads = reinterpret_cast<decltype(&lla_set_num_threads)>(dlsym(library, "lla_set_num_threads"));
    const auto forward = reinterpret_cast<decltype(&lla_forward)>(dlsym(library, "lla_forward"));
    set_threads(4);
    const Call call;
    if (forward(&call.args) != LLA_OK) return 2;
    if (dlclose(library) != 0) return 2;
    return dlopen(LLA_SHARED_LIBRARY, RTLD_NOW | RTLD_NOLOAD) != nullptr ? 0 : 3;  // their code must stay
  }
  return 9;
}

// The exit code of this program doing one of these, or minus the signal that ended it.
int run_probe(const std::string& what, const char* threads = nullptr) {
  std::vector<std::string> environment;
  for (char** e = environ; *e != nullptr; ++e) {
    if (std::strncmp(*e, "LLA_NUM_THREADS=", 16) != 0) environment.emplace_back(*e);
  }
  if (threads != nullptr) environment.push_back(std::string("LLA_NUM_THREADS=") + threads);
  if (what == "early") environment.emplace_back("LLA_PROBE_EARLY=1");
  std::vector<char*> pointers;
  for (std::string& e : environment) pointers.push_back(e.data());
  pointers.push_back(nullptr);
  std::string program = "/proc/self/exe", argument = "probe=" + what;
  char* const argv[] = {program.data(), argument.data(), nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, program.c_str(), nullptr, nullptr, argv, pointers.data()) != 0) return -1000;
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

const int kChildren = lla::test::reduced() ? 6 : 25;

// ---- tests ---------------------------------------------------------------------------------------------------------

TEST(Start, CallsBeforeMain) { EXPECT_EQ(run_probe("early"), 0); }

// The first allocation of a call fails, then the second, and so on: an answer each time, and the next call is as good
// as any. A call on the CPU that has run before allocates nothing at all.
TEST(Memory, EveryAllocationMayFail) {
  lla_set_num_threads(4);
  for (const char* implementation : {"cpu", "reference"}) {
    Call call;
    call.args.options.implementation = implementation;
    ASSERT_EQ(call.run(), LLA_OK) << lla_last_error();
    const std::vector<float> want = call.o;
    const auto sweep = [&](const char* what, lla_status good, const auto& body) {
      int failed = 0;
      for (int n = 0; n < 100000; n += n < 200 ? 1 : 997) {
        allocations_left = n;
        const lla_status status = body();
        const bool enough = allocations_left > 0 || (status == good && allocations_left == 0);
        allocations_left = -1;
        EXPECT_TRUE(status == good || status == LLA_OUT_OF_MEMORY) << what << ": " << lla_status_name(status);
        EXPECT_EQ(status == LLA_OK, *lla_last_error() == '\0') << what;
        failed += status == LLA_OUT_OF_MEMORY;
        if (enough && status == good) break;
      }
      return failed;
    };
    const int failed = sweep("forward", LLA_OK, [&] { return call.run(); });
    EXPECT_EQ(failed == 0, std::string(implementation) == "cpu") << implementation << ": " << failed;
    sweep("workspace", LLA_OK, [&] {
      size_t bytes = 0;
      return workspace_bytes(call.args, bytes).code();
    });
    sweep("plan", LLA_OK, [&] {
      char text[512];
      return lla_forward_plan(&call.args, text, sizeof text);
    });
    lla::ForwardArgs bad = call.args;
    bad.q.size[3] = 7;
    sweep("refusal", LLA_INVALID_ARGUMENT, [&] { return lla_forward(&bad); });
    ASSERT_EQ(call.run(), LLA_OK) << lla_last_error();
    EXPECT_EQ(call.o, want);
  }
  lla_set_num_threads(0);
}

TEST(Exit, CallsFromStaticDestructors) { EXPECT_EQ(run_probe("static"), 0); }

TEST(Exit, ThreadsThatStillCompute) {
  for (int i = 0; i < (lla::test::reduced() ? 2 : 5); ++i) EXPECT_EQ(run_probe("threads"), 0);
}

TEST(Unload, ThreadsOutliveTheLibrary) { EXPECT_EQ(run_probe("unload"), 0); }

TEST(Environment, ANumberOfThreadsOrARefusalByName) {
  for (const char* good : {"", "0", "1", "3", "1000000", "99999999999999999999"})
    EXPECT_EQ(run_probe("environment", good), 0) << good;
  for (const char* bad : {"1e3", "abc", "-1", "4x", " ", "2.5", "0x10", "-99999999999999999999"})
    EXPECT_EQ(run_probe("environment", bad), 1) << bad;
  EXPECT_EQ(run_probe("environment"), 0);
}

// A child that does not come back within seconds hangs. It must compute what its parent computes.
int run_child(const Call& call, const std::vector<float>& want) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    const bool same = call.run() == LLA_OK && call.o == want;
    _exit(same ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(Fork, ChildrenCompute) {
  if (!kForksAllowed) GTEST_SKIP() << "not under this sanitizer";
  for (const int threads : {4, 8}) {
    lla_set_num_threads(threads);
    const Call call;
    for (int i = 0; i < kChildren; ++i) {
      ASSERT_EQ(call.run(), LLA_OK) << lla_last_error();  // leaves the pool's threads on their way to sleep
      const std::vector<float> want = call.o;
      ASSERT_EQ(run_child(call, want), 0) << "child " << i;
    }
  }
  lla_set_num_threads(0);
}

// Other threads of the parent are in the middle of calls, their locks held, when it forks; and children fork again.
TEST(Fork, ChildrenComputeWhateverTheParentWasDoing) {
  if (!kForksAllowed) GTEST_SKIP() << "not under this sanitizer";
  lla_set_num_threads(4);
  const Call call;
  ASSERT_EQ(call.run(), LLA_OK) << lla_last_error();
  const std::vector<float> want = call.o;
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3; ++i) {
    busy.emplace_back([&] {
      const Call mine;
      while (!stop) mine.run();
    });
  }
  for (int i = 0; i < kChildren; ++i) ASSERT_EQ(run_child(call, want), 0) << "child " << i;
  stop = true;
  for (std::thread& t : busy) t.join();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(run_child(call, want) == 0 && run_child(call, want) == 0 && call.run() == LLA_OK ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  lla_set_num_threads(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strncmp(argv[1], "probe=", 6) == 0) return probe(argv[1] + 6);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
