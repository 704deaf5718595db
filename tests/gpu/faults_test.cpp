// What can go wrong around a call on a GPU: pointers of the wrong memory, errors somebody left behind, a device without
// memory, a faulted context, many threads and processes at once. (About a minute on an H200; LLA_SOAK_RUNS changes the
// number of repeats.)
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "core/text.hpp"
#include "gpu/calls.hpp"

namespace lla::test {
namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

class GpuFaults : public OnGpu {};
LLA_EACH_CUDA_IMPLEMENTATION(GpuFaults);

Spec some_spec(int64_t length = 300) {
  Spec spec = self_attention(length, 64, 4);
  spec.heads_kv = 2;
  spec.dtype = DType::bf16;
  spec.ridge = RidgeShape::token;
  return spec;
}

Spec packed_spec() {
  Spec spec = some_spec();
  spec.cu_q = {0, 120, 260};
  spec.cu_k = {0, 130, 250};
  return spec;
}

// Every output as it lies in memory.
std::vector<uint8_t> bits(const Calls& c) {
  std::vector<uint8_t> all;
  for (const TestTensor* t : {&c.o, &c.saved, &c.dq, &c.dk, &c.dv, &c.dridge}) {
    const lla_tensor& view = t->view();
    size_t bytes = static_cast<size_t>(core::size_of(static_cast<DType>(view.dtype)));
    for (int d = 0; d < view.ndim; ++d) bytes *= static_cast<size_t>(view.size[d]);
    const size_t at = all.size();
    all.resize(at + bytes);
    EXPECT_EQ(cudaMemcpy(all.data() + at, view.data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  }
  return all;
}

std::vector<uint8_t> run_once(const Calls& c, cudaStream_t stream = nullptr) {
  c.issue(stream);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  return bits(c);
}

// ---- pointers ------------------------------------------------------------------------------------------------------

// Each tensor in turn in host memory although it says CUDA: found by name before a kernel finds it, and the device is
// none the worse.
TEST_P(GpuFaults, AnyHostPointerIsRefusedByName) {
  const Spec spec = packed_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 1);
  Calls calls(spec, inputs, implementation());
  const auto want = run_once(calls);
  std::vector<char> host(size_t{1} << 24);
  void* const aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(host.data()) + 255) / 256 * 256);
  const auto expect_refused = [&](const char* name, void*& pointer, const std::function<Status()>& call) {
    void* const good = std::exchange(pointer, aligned);
    const Status status = call();
    pointer = good;
    EXPECT_EQ(status.code(), LLA_INVALID_ARGUMENT) << name << ": " << status.message();
    EXPECT_EQ(status.message().rfind(std::string(name) + ": the pointer is host memory", 0), 0u) << status.message();
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << name;
  };
  ForwardArgs& f = calls.forward;
  const auto forward = [&] { return lla::forward(f); };
  for (const auto& [name, t] : std::vector<std::pair<const char*, lla_tensor*>>{{"q", &f.q},
                                                                                {"k", &f.k},
                                                                                {"v", &f.v},
                                                                                {"ridge", &f.ridge},
                                                                                {"o", &f.o},
                                                                                {"saved", &f.saved},
                                                                                {"cu_seqlens_q", &f.cu_seqlens_q},
                                                                                {"cu_seqlens_k", &f.cu_seqlens_k}})
    expect_refused(name, t->data, forward);
  expect_refused("workspace", f.workspace, forward);
  BackwardArgs& b = calls.backward;
  const auto backward = [&] { return lla::backward(b); };
  for (const auto& [name, t] : std::vector<std::pair<const char*, lla_tensor*>>{{"grad_o", &b.grad_o},
                                                                                {"dq", &b.dq},
                                                                                {"dk", &b.dk},
                                                                                {"dv", &b.dv},
                                                                                {"dridge", &b.dridge},
                                                                                {"saved", &b.saved}})
    expect_refused(name, t->data, backward);
  expect_refused("workspace", b.workspace, backward);
  EXPECT_EQ(run_once(calls), want);
}

TEST_P(GpuFaults, ADeviceThatIsNotThereIsRefused) {
  int count = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&count));
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  Calls calls(spec, make_inputs(spec, data::Kind::randn, 0.1, 1), implementation());
  ForwardArgs args = calls.forward;
  for (const int device : {count, 63, 64, 1000000}) {
    for (lla_tensor* t : {&args.q, &args.k, &args.v, &args.ridge, &args.o, &args.saved}) t->device_index = device;
    const Status status = lla::forward(args);
    EXPECT_EQ(status.code(), LLA_UNSUPPORTED) << status.message();
    EXPECT_NE(status.message().find("device " + std::to_string(device)), std::string::npos) << status.message();
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  }
  if (count < 2) return;
  for (lla_tensor* t : {&args.q, &args.k, &args.v, &args.ridge, &args.o, &args.saved})
    t->device_index = (gpu_index() + 1) % count;
  const Status status = lla::forward(args);  // memory of one device that says it is another's
  EXPECT_EQ(status.code(), LLA_INVALID_ARGUMENT) << status.message();
}

// ---- errors that were there before ---------------------------------------------------------------------------------

// A failed call of the program's own leaves its error for whoever asks. We do not report it as ours, nor take it away.
TEST_P(GpuFaults, AnEarlierErrorIsNeitherOursNorTaken) {
  const Spec spec = packed_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  Calls calls(spec, make_inputs(spec, data::Kind::randn, 0.1, 2), implementation());
  const auto want = run_once(calls);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, size_t{1} << 60), cudaErrorMemoryAllocation);
  calls.issue(nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(bits(calls), want);
}

// A launch that fails is reported with its name and leaves nothing behind. (The default stream may not be used while
// another is captured.)
TEST_P(GpuFaults, AFailedLaunchIsReportedOnceAndForgotten) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  Calls calls(spec, make_inputs(spec, data::Kind::randn, 0.1, 3), implementation());
  const auto want = run_once(calls);
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  calls.forward.stream = calls.backward.stream = nullptr;
  const Status status = lla::forward(calls.forward);
  EXPECT_EQ(status.code(), LLA_CUDA_ERROR) << status.message();
  EXPECT_NE(status.message().find("cudaErrorStreamCapture"), std::string::npos) << status.message();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "our error was left to the program";
  cudaGraph_t graph = nullptr;
  EXPECT_NE(cudaStreamEndCapture(stream, &graph), cudaSuccess);  // the capture is void
  cudaGetLastError();
  ASSERT_CUDA(cudaStreamDestroy(stream));
  EXPECT_EQ(run_once(calls), want);
}

// ---- memory --------------------------------------------------------------------------------------------------------

// All memory of the device but a few megabytes is taken: a call brings its own and needs no more.
TEST_P(GpuFaults, ADeviceWithoutMemory) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  Spec wide = spec;
  wide.dim = wide.value_dim = 128;
  Calls calls(spec, make_inputs(spec, data::Kind::randn, 0.1, 4), implementation());
  Calls other(wide, make_inputs(wide, data::Kind::randn, 0.1, 4), implementation());
  const auto want = run_once(calls);  // also loads the kernels
  std::vector<void*> taken;
  for (size_t bytes = size_t{64} << 30; bytes >= size_t{1} << 20;) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) {
      taken.push_back(memory);
    } else {
      bytes /= 2;
    }
  }
  cudaGetLastError();
  const auto got = run_once(calls);
  // A kernel that has not been loaded yet may find no room; that is said, and nothing else happens.
  const Status unloaded = lla::forward(other.forward);
  EXPECT_TRUE(unloaded || unloaded.code() == LLA_OUT_OF_MEMORY) << unloaded.message();
  cudaDeviceSynchronize();
  for (void* memory : taken) cudaFree(memory);
  EXPECT_EQ(got, want);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

// ---- streams, graphs, threads --------------------------------------------------------------------------------------

TEST_P(GpuFaults, TheDefaultStreamsByName) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  Calls calls(spec, make_inputs(spec, data::Kind::randn, 0.1, 5), implementation());
  const auto want = run_once(calls);
  EXPECT_EQ(run_once(calls, cudaStreamLegacy), want);
  EXPECT_EQ(run_once(calls, cudaStreamPerThread), want);
}

// A graph holds addresses: with other sequences in the same cu_seqlens it computes those, and zeroes behind them.
TEST_P(GpuFaults, AGraphFollowsTheSequencesItFinds) {
  const Spec spec = packed_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  Spec shorter = spec;
  shorter.cu_q = {0, 33, 97};
  shorter.cu_k = {0, 40, 140};
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 6);
  Calls captured(spec, inputs, implementation());
  const auto want = run_once(captured);
  const auto want_shorter = run_once(Calls(shorter, inputs, implementation()));
  ASSERT_NE(want, want_shorter);
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  captured.issue(stream);
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (const bool use_shorter : {true, false, true}) {
    const Spec& now = use_shorter ? shorter : spec;
    for (const auto& [tensor, cu] : {std::pair{&captured.cu_q, &now.cu_q}, {&captured.cu_k, &now.cu_k}})
      ASSERT_CUDA(cudaMemcpy(tensor->view().data, cu->data(), cu->size() * 4, cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaGraphLaunch(executable, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(bits(captured), use_shorter ? want_shorter : want);
  }
  ASSERT_CUDA(cudaGraphExecDestroy(executable));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST_P(GpuFaults, ManyThreadsOnOneDevice) {
  constexpr int kThreads = 16;
  std::vector<std::unique_ptr<Calls>> calls;
  std::vector<std::vector<uint8_t>> want;
  for (int i = 0; i < kThreads; ++i) {
    const Spec spec = i % 2 ? some_spec(100 + 17 * i) : packed_spec();
    LLA_SKIP_UNLESS_TAKEN(spec);
    calls.push_back(std::make_unique<Calls>(spec, make_inputs(spec, data::Kind::randn, 0.1, 7 + i), implementation()));
    want.push_back(run_once(*calls.back()));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      cudaSetDevice(gpu_index());
      cudaStream_t stream = nullptr;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      for (int repeat = 0; repeat < 25; ++repeat) wrong += run_once(*calls[i], stream) != want[i];
      // A thread's message is its own.
      ForwardArgs bad = calls[i]->forward;
      bad.options.causal = 100 + i;
      wrong += lla::forward(bad).message().find(std::to_string(100 + i)) == std::string::npos;
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
}

// ---- processes -----------------------------------------------------------------------------------------------------

// Starts this program again with one test and a variable that lets it run.
pid_t start_probe(const char* test) {
  std::string program = "/proc/self/exe", filter = std::string("--gtest_filter=") + test;
  char* const argv[] = {program.data(), filter.data(), nullptr};
  std::vector<char*> environment;
  std::string allow = "LLA_GPU_PROBE=1";
  for (char** e = environ; *e != nullptr; ++e) environment.push_back(*e);
  environment.push_back(allow.data());
  environment.push_back(nullptr);
  pid_t child = -1;
  return posix_spawn(&child, program.c_str(), nullptr, nullptr, argv, environment.data()) == 0 ? child : -1;
}
bool is_probe() { return std::getenv("LLA_GPU_PROBE") != nullptr && gpu().present; }

// The same bits a thousand times, while another process keeps the device busy.
TEST_P(GpuFaults, SoakBesideAnotherProcess) {
  const char* asked = std::getenv("LLA_SOAK_RUNS");
  const int runs = asked != nullptr ? std::atoi(asked) : reduced() ? 20 : 1000;
  for (const int dim : {64, 128}) {
    Spec spec = some_spec(dim == 64 ? 512 : 200);
    spec.dim = spec.value_dim = dim;
    LLA_SKIP_UNLESS_TAKEN(spec);
    Calls calls(spec, make_inputs(spec, data::Kind::aniso, 0.05, 20), implementation());
    const auto want = run_once(calls);
    const pid_t load = start_probe("GpuProbe.Load");
    ASSERT_GT(load, 0);
    int different = 0;
    for (int i = 0; i < runs / 2; ++i) different += run_once(calls) != want;
    EXPECT_EQ(different, 0) << "of " << runs / 2 << " runs, head dimension " << dim;
    EXPECT_EQ(kill(load, SIGTERM), 0) << "the load ended early";
    waitpid(load, nullptr, 0);
  }
}

TEST(GpuProbe, Load) {
  if (!is_probe()) GTEST_SKIP() << "started by SoakBesideAnotherProcess";
  Spec spec = self_attention(2048, 64, 16);
  spec.dtype = DType::bf16;
  Calls calls(spec, make_inputs(spec, data::Kind::randn, 0.1, 1), "cuda-portable");
  for (;;) {
    calls.issue(nullptr);
    if (cudaDeviceSynchronize() != cudaSuccess) _exit(1);
  }
}

// A kernel has faulted, ours or anyone's: the context is lost, and every call says that it was earlier work.
TEST(GpuFaultedContext, IsNamed) {
  if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  const pid_t child = start_probe("GpuProbe.Fault");
  ASSERT_GT(child, 0);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(GpuProbe, Fault) {
  if (!is_probe()) GTEST_SKIP() << "started by GpuFaultedContext";
  Spec spec = packed_spec();
  spec.dtype = DType::f32;
  Calls calls(spec, make_inputs(spec, data::Kind::randn, 0.1, 1), "cuda-portable");
  const int32_t wild[3] = {1 << 29, (1 << 29) + 100, (1 << 29) + 200};  // which no host can check
  cudaMemcpy(calls.cu_q.view().data, wild, sizeof wild, cudaMemcpyHostToDevice);
  (void)lla::forward(calls.forward);
  const bool faulted = cudaDeviceSynchronize() != cudaSuccess;
  const Status forward = lla::forward(calls.forward), backward = lla::backward(calls.backward);
  const bool named = forward.code() == LLA_CUDA_ERROR && backward.code() == LLA_CUDA_ERROR &&
                     forward.message().find("earlier work") != std::string::npos;
  std::fprintf(stderr, "after a fault: %s\n", forward.message().c_str());
  _exit(faulted && named ? 0 : 1);  // nothing here can be freed any more
}

}  // namespace
}  // namespace lla::test
