// Calls on a GPU whose memory the test holds: for streams, graphs, threads and faults.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "gpu/gpu_test.hpp"

namespace lla::test {

// A forward and a backward call with all their memory, to be issued as often and on whatever stream one likes.
struct Calls {
  Memory& memory = *cuda_memory();
  TestTensor q, k, v, ridge, grad_o, o, saved, dq, dk, dv, dridge, cu_q, cu_k;
  std::unique_ptr<GuardedBuffer> workspace, backward_workspace;
  ForwardArgs forward;
  BackwardArgs backward;

  Calls(const Spec& s, const Inputs& in, const std::string& implementation)
      : q(memory, "q", s.dtype, s.rows_size(s.dim), s.layout, in.q),
        k(memory, "k", s.dtype, s.keys_size(s.dim), s.layout, in.k),
        v(memory, "v", s.dtype, s.keys_size(s.value_dim), s.layout, in.v),
        ridge(memory, "ridge", s.ridge_dtype(), s.ridge_size(), s.layout, in.ridge),
        grad_o(memory, "grad_o", s.dtype, s.rows_size(s.value_dim), s.layout, in.grad_o),
        o(memory, "o", s.output(), s.rows_size(s.value_dim), s.layout),
        dq(memory, "dq", s.output(), s.rows_size(s.dim), s.layout),
        dk(memory, "dk", s.output(), s.keys_size(s.dim), s.layout),
        dv(memory, "dv", s.output(), s.keys_size(s.value_dim), s.layout),
        dridge(memory, "dridge", s.ridge_dtype(), s.ridge_size(), s.layout) {
    if (s.packed()) {  // the bounds are the totals: what cu_seqlens holds may change between calls
      const auto entries = [](const std::vector<int32_t>& cu) { return std::vector<double>(cu.begin(), cu.end()); };
      const auto size = static_cast<int64_t>(s.cu_q.size());
      cu_q = TestTensor(memory, "cu_seqlens_q", DType::i32, {size}, Layout::dense, entries(s.cu_q));
      cu_k = TestTensor(memory, "cu_seqlens_k", DType::i32, {size}, Layout::dense, entries(s.cu_k));
    }
    const auto attach = [&](auto& args) {
      args.options = s.options;
      args.options.implementation = implementation.c_str();
      args.q = q.view();
      args.k = k.view();
      args.v = v.view();
      args.ridge = ridge.view();
      args.cu_seqlens_q = cu_q.view();
      args.cu_seqlens_k = cu_k.view();
      if (s.packed()) args.max_seqlen_q = s.length_q, args.max_seqlen_k = s.length_k;
    };
    attach(forward);
    attach(backward);
    forward.o = o.view();
    ForwardSizes sizes;
    if (const Status status = query(forward, sizes); !status) throw std::runtime_error(status.message());
    saved = TestTensor(memory, "saved", s.ridge_dtype(), {sizes.saved_elements});
    forward.saved = backward.saved = saved.view();
    backward.grad_o = grad_o.view();
    backward.dq = dq.view();
    backward.dk = dk.view();
    backward.dv = dv.view();
    backward.dridge = dridge.view();
    workspace = attach_workspace(forward);
    backward_workspace = attach_workspace(backward);
  }

  template <class Args>
  std::unique_ptr<GuardedBuffer> attach_workspace(Args& args) {
    size_t bytes = 0;
    if (const Status status = workspace_bytes(args, bytes); !status) throw std::runtime_error(status.message());
    auto buffer = std::make_unique<GuardedBuffer>(memory, bytes);
    args.workspace = buffer->data();
    args.workspace_bytes = bytes;
    return buffer;
  }

  void issue(cudaStream_t stream) const {
    ForwardArgs first = forward;
    BackwardArgs second = backward;
    first.stream = second.stream = stream;
    const Status a = lla::forward(first);
    ASSERT_TRUE(a) << a.message();
    const Status b = lla::backward(second);
    ASSERT_TRUE(b) << b.message();
  }
  std::vector<std::vector<double>> results() const {
    return {o.values(), saved.values(), dq.values(), dk.values(), dv.values(), dridge.values()};
  }
};

}  // namespace lla::test
