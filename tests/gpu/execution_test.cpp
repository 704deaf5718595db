// How calls behave on a GPU: streams, graphs, repeated runs, devices, memory far apart, and what a refused call leaves
// alone.
#include <cuda_runtime_api.h>

#include "gpu/calls.hpp"

namespace lla::test {
namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

class Execution : public OnGpu {};
LLA_EACH_CUDA_IMPLEMENTATION(Execution);

Spec some_spec(DType dtype = DType::bf16) {
  Spec spec = self_attention(300, 64, 4, 2);
  spec.heads_kv = 2;
  spec.dtype = dtype;
  spec.out_dtype = DType::f32;
  spec.ridge = RidgeShape::token;
  return spec;
}

void expect_identical(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b) {
  static const char* const names[] = {"o", "saved", "dq", "dk", "dv", "dridge"};
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(identical(a[i], b[i])) << names[i];
}

TEST_P(Execution, SameInputSameBits) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::aniso, 0.01, 1);
  Calls first(spec, inputs, implementation());
  first.issue(nullptr);
  first.memory.synchronize();
  const auto want = first.results();
  for (int repeat = 0; repeat < (reduced() ? 1 : 5); ++repeat) {
    Calls again(spec, inputs, implementation());
    again.issue(nullptr);
    again.memory.synchronize();
    expect_identical(again.results(), want);
  }
}

// With every multiprocessor at work, where timing differs from run to run: a race would show, if anywhere, here.
TEST_P(Execution, AFullMachineRepeatsItself) {
  for (const int dim : {64, 128}) {
    for (const lla_weights weights : {LLA_WEIGHTS_CACHED, LLA_WEIGHTS_RECOMPUTE}) {
      Spec spec = self_attention(reduced() ? 256 : 1500, dim, reduced() ? 2 : 32, 1);
      spec.dtype = DType::bf16;
      spec.out_dtype = DType::f32;
      spec.ridge = RidgeShape::token;
      spec.options.weights = weights;
      if (!takes(spec)) continue;
      const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 2);
      Calls calls(spec, inputs, implementation());
      calls.issue(nullptr);
      calls.memory.synchronize();
      const auto want = calls.results();
      for (int repeat = 0; repeat < (reduced() ? 1 : 4); ++repeat) {
        for (int i = 0; i < 5; ++i) calls.issue(nullptr);  // one behind the other
        calls.memory.synchronize();
        expect_identical(calls.results(), want);
      }
    }
  }
}

TEST_P(Execution, AnyStream) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 2);
  Calls plain(spec, inputs, implementation()), streamed(spec, inputs, implementation());
  plain.issue(nullptr);
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  streamed.issue(stream);
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  ASSERT_CUDA(cudaStreamDestroy(stream));
  plain.memory.synchronize();
  expect_identical(streamed.results(), plain.results());
}

// Capturing forbids synchronisation and allocation, so this also shows that a call does neither.
TEST_P(Execution, GraphCapture) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 3);
  Calls plain(spec, inputs, implementation()), captured(spec, inputs, implementation());
  plain.issue(nullptr);
  plain.memory.synchronize();
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  captured.issue(stream);
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 2; ++replay) ASSERT_CUDA(cudaGraphLaunch(executable, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  ASSERT_CUDA(cudaGraphExecDestroy(executable));
  ASSERT_CUDA(cudaGraphDestroy(graph));
  ASSERT_CUDA(cudaStreamDestroy(stream));
  expect_identical(captured.results(), plain.results());
}

TEST_P(Execution, EveryDevice) {
  int count = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one CUDA device only";
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 4);
  Calls calls(spec, inputs, implementation());
  ASSERT_CUDA(cudaSetDevice((gpu_index() + 1) % count));  // another one is current; the tensors say where they are
  calls.issue(nullptr);
  int current = -1;
  ASSERT_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, (gpu_index() + 1) % count);
  ASSERT_CUDA(cudaSetDevice(gpu_index()));
  calls.memory.synchronize();
  EXPECT_TRUE(all_finite(calls.o.values()));
}

TEST_P(Execution, ARefusedCallWritesNothing) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 5);
  Calls calls(spec, inputs, implementation());
  calls.forward.workspace_bytes -= 1;
  EXPECT_EQ(lla::forward(calls.forward).code(), LLA_WORKSPACE_TOO_SMALL);
  calls.memory.synchronize();
  calls.o.expect_untouched();
  calls.saved.expect_untouched();
}

// A host pointer behind a tensor that says CUDA is found out before a kernel is.
TEST_P(Execution, HostPointersAreRefused) {
  const Spec spec = some_spec();
  LLA_SKIP_UNLESS_TAKEN(spec);
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 6);
  Calls calls(spec, inputs, implementation());
  std::vector<uint16_t> host(static_cast<size_t>(spec.rows() * spec.dim));
  calls.forward.q.data = host.data();
  EXPECT_FALSE(lla::forward(calls.forward));
  calls.memory.synchronize();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Rows so far apart that the last ones lie beyond 2^31 elements.
TEST_P(Execution, OffsetsBeyond32Bits) {
  if (reduced()) GTEST_SKIP() << "takes five gigabytes";
  const int64_t length = 33, dim = 64, stride = int64_t{1} << 26;  // 33 rows of 2^26 elements: 2.2e9
  Spec spec = self_attention(length, dim);
  spec.dtype = DType::bf16;
  spec.out_dtype = DType::f32;
  LLA_SKIP_UNLESS_TAKEN(spec);
  size_t free_bytes = 0, total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free_bytes, &total));
  const size_t bytes = static_cast<size_t>(length * stride) * 2;
  if (free_bytes < bytes + (size_t{1} << 30)) GTEST_SKIP() << "not enough memory on the device";
  const Inputs inputs = make_inputs(spec, data::Kind::randn, 0.1, 7);
  const Forward want = run_forward(spec, inputs, implementation());
  ASSERT_EQ(want.status, LLA_OK) << want.message;

  // The key tensor alone is spread out; row i holds what the dense one's row i does.
  Memory& memory = *cuda_memory();
  const TestTensor q(memory, "q", spec.dtype, spec.rows_size(dim), Layout::dense, inputs.q);
  const TestTensor v(memory, "v", spec.dtype, spec.keys_size(dim), Layout::dense, inputs.v);
  const TestTensor ridge(memory, "ridge", DType::f32, spec.ridge_size(), Layout::dense, inputs.ridge);
  const TestTensor o(memory, "o", DType::f32, spec.rows_size(dim));
  const TestTensor dense_k(memory, "k", spec.dtype, spec.keys_size(dim), Layout::dense, inputs.k);
  char* far = static_cast<char*>(memory.allocate(bytes));
  for (int64_t i = 0; i < length; ++i) {
    ASSERT_CUDA(cudaMemcpy(far + i * stride * 2, static_cast<const char*>(dense_k.view().data) + i * dim * 2, dim * 2,
                           cudaMemcpyDeviceToDevice));
  }
  ForwardArgs args;
  args.options = spec.options;
  args.options.implementation = implementation().c_str();
  args.q = q.view();
  args.k = strided(far, spec.dtype, {1, length, 1, dim}, {length * stride, stride, dim, 1}, gpu_index());
  args.v = v.view();
  args.ridge = ridge.view();
  args.o = o.view();
  size_t needed = 0;
  ASSERT_TRUE(workspace_bytes(args, needed)) << lla_last_error();
  GuardedBuffer workspace(memory, needed);
  args.workspace = workspace.data();
  args.workspace_bytes = needed;
  const Status status = lla::forward(args);
  memory.synchronize();
  EXPECT_TRUE(status) << status.message();
  expect_output(spec, o.values(), want.o, rounding_gate(DType::f32));
  memory.release(far);
}

}  // namespace
}  // namespace lla::test
