#include "cuda/portable/portable.hpp"

#include "core/text.hpp"
#include "cuda/common/device.hpp"
#include "cuda/common/runtime.hpp"
#include "cuda/portable/arguments.hpp"
#include "cuda/portable/config.hpp"
#include "cuda/portable/decode.hpp"
#include "cuda/portable/layout.hpp"

namespace lla::cuda::portable {
namespace {

using core::cat;

std::string refuse(const core::Problem& p, const core::Machine& machine) {
  const core::CudaDevice& device = machine.cuda;
  if (device.arch < kOldestArch) {
    return cat("needs compute capability ", kOldestArch / 10, ".", kOldestArch % 10, ", the device has ",
               device.arch / 10, ".", device.arch % 10);
  }
  if (device.shared_memory_per_block < kSharedMemoryLimit) {
    return cat("needs ", kSharedMemoryLimit, " bytes of shared memory per block, the device has ",
               device.shared_memory_per_block);
  }
  if (p.dim > kLargestDim || p.value_dim > kLargestDim) {
    return cat("takes head dimensions up to ", kLargestDim, ", not D = ", p.dim, " with Dv = ", p.value_dim);
  }
  if (p.weights == Weights::cached) return "always recomputes the weights";
  const int64_t longest = p.seqlen_q > p.seqlen_k ? p.seqlen_q : p.seqlen_k;
  if ((longest + 7) / 8 * p.heads_q * p.batch > INT32_MAX) return "has more tiles than a CUDA grid takes blocks";
  return {};
}

core::Plan plan(const core::Problem& p, const core::Machine& machine) {
  core::Plan plan;
  plan.solver = p.solver;
  plan.cached_weights = false;
  plan.workers = direct_blocks(p, machine.cuda);
  // Decode runs before the others: they may use the same memory.
  const int64_t blocks_of_rows = has_block_rows(p) ? Layout(p, plan.workers).bytes : 0;
  plan.workspace_bytes = static_cast<size_t>(std::max(blocks_of_rows, DecodeLayout(p).bytes));
  with_bucket(dim_bucket(p.dim, p.value_dim), [&](auto bucket) {
    const auto take = [&](auto config) {
      plan.block_rows = config.kOwn;
      plan.block_keys = config.kOther;
    };
    if (p.dtype == DType::f64) {
      take(Config<double, bucket.value>{});
    } else {
      take(Config<float, bucket.value>{});
    }
  });
  return plan;
}

core::Notes notes(const core::Problem& p, const core::Machine&, const core::Plan&) {
  core::Notes notes{{"arithmetic", p.dtype == DType::f64 ? "f64" : "f32"}};
  if (has_decoded_rows(p)) {
    notes.emplace_back("decode", cat("sequences of up to ", kMostDecodedRows, " rows per key head, directly in f64, ",
                                     "keys split into up to ", DecodeLayout(p).spans, " spans",
                                     has_block_rows(p) ? "; the others as follows" : ""));
  }
  if (p.given_x()) {
    notes.emplace_back("solve", "none, x is given");
  } else if (p.solver == Solver::automatic) {
    notes.emplace_back("solve", cat("rows with at most ", p.dim, " keys directly, the others by conjugate gradients",
                                    rescues(p) ? ", and directly where those do not finish" : ""));
  }
  return notes;
}

// The arguments both passes share. Sections of the workspace that `saved` replaces are set by the caller.
template <class T, class Call>
Arguments<T> arguments(const Call& call, const core::Plan& plan) {
  Arguments<T> a;
  a.problem = call.problem;
  a.q = call.q;
  a.k = call.k;
  a.v = call.v;
  a.ridge = call.ridge;
  a.x = call.x;
  a.cu_seqlens_q = call.cu_seqlens_q;
  a.cu_seqlens_k = call.cu_seqlens_k;
  a.info = call.info;
  const Layout layout(call.problem, plan.workers);
  const auto at = [&](int64_t offset) { return offset < 0 ? nullptr : static_cast<char*>(call.workspace) + offset; };
  const auto array = [&](int64_t offset) { return reinterpret_cast<T*>(at(offset)); };
  a.shift = array(layout.shift);
  a.rows.max = array(layout.max);
  a.rows.omega = array(layout.omega);
  a.rows.mean_k = array(layout.mean_k);
  a.rows.mean_v = array(layout.mean_v);
  a.rows.x = array(layout.x);
  a.rows.residual = array(layout.residual);
  a.rows.kind = reinterpret_cast<int32_t*>(at(layout.kind));
  a.rows.y = array(layout.y);
  a.rows.mean_e = array(layout.mean_e);
  a.rows.tau = array(layout.tau);
  a.rows.tau_low = array(layout.tau_low);
  a.rows.mean_b = array(layout.mean_b);
  a.rows.c = array(layout.c);
  a.rows.exponent = reinterpret_cast<int32_t*>(at(layout.exponent));
  a.rows.dridge = reinterpret_cast<double*>(at(layout.dridge));
  a.matrices = reinterpret_cast<double*>(at(layout.matrices));
  a.direct_blocks = plan.workers;
  a.direct_keys = direct_keys(call.problem);
  a.rescue = rescues(call.problem);
  return a;
}

template <class T>
Status solve(const Arguments<T>& a, cudaStream_t stream) {
  return a.problem.given_x() || a.problem.solver == Solver::direct ? Status() : launch_cg(a, stream);
}

template <class T>
Status solve_rest_directly(const Arguments<T>& a, cudaStream_t stream) {
  return a.direct_blocks == 0 ? Status() : launch_direct(a, stream);
}

Status decode(const core::ForwardCall& call, cudaStream_t stream) {
  Arguments<double> a;
  a.problem = call.problem;
  a.q = call.q, a.k = call.k, a.v = call.v, a.ridge = call.ridge, a.x = call.x, a.o = call.o;
  a.cu_seqlens_q = call.cu_seqlens_q;
  a.cache = call.cache;
  a.info = call.info;
  return launch_decode(a, call.workspace, stream);
}

template <class T>
Status run(const core::ForwardCall& call, const core::Plan& plan) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  if (has_decoded_rows(call.problem)) LLA_RETURN_IF_ERROR(decode(call, stream));
  if (!has_block_rows(call.problem)) return {};
  Arguments<T> a = arguments<T>(call, plan);
  a.o = call.o;
  a.cache = call.cache;
  if (call.saved != nullptr) {
    const core::SavedLayout saved(call.problem);
    T* base = static_cast<T*>(call.saved);
    a.rows.max = base + saved.max;
    a.rows.omega = base + saved.omega;
    a.rows.mean_k = base + saved.mean_k;
    a.rows.mean_v = base + saved.mean_v;
    a.rows.x = base + saved.x;
  }
  a.solution = a.rows.x;
  LLA_RETURN_IF_ERROR(launch_shift(a, stream));
  LLA_RETURN_IF_ERROR(launch_stats(a, stream));
  LLA_RETURN_IF_ERROR(solve(a, stream));
  LLA_RETURN_IF_ERROR(launch_output(a, stream));
  LLA_RETURN_IF_ERROR(solve_rest_directly(a, stream));
  return call.saved != nullptr ? launch_unshift(a, stream) : Status();
}

// The statistics are worked out again: they must belong to the weights this pass computes, whoever ran the forward.
template <class T>
Status run(const core::BackwardCall& call, const core::Plan& plan) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  Arguments<T> a = arguments<T>(call, plan);
  a.grad_o = call.grad_o;
  a.dq = call.dq;
  a.dk = call.dk;
  a.dv = call.dv;
  a.dridge = call.dridge;
  a.dx = call.dx;
  a.rows.x = static_cast<T*>(const_cast<void*>(call.saved)) + core::SavedLayout(call.problem).x;
  a.solution = a.rows.y;
  LLA_RETURN_IF_ERROR(launch_shift(a, stream));
  LLA_RETURN_IF_ERROR(launch_stats(a, stream));
  LLA_RETURN_IF_ERROR(launch_rhs(a, stream));
  LLA_RETURN_IF_ERROR(solve(a, stream));
  LLA_RETURN_IF_ERROR(solve_rest_directly(a, stream));
  LLA_RETURN_IF_ERROR(launch_dq(a, stream));
  if (a.dk || a.dv) LLA_RETURN_IF_ERROR(launch_dkdv(a, stream));
  return a.dridge ? launch_dridge(a, stream) : Status();
}

// Checks that what the tensors say of their device is true, then runs in the arithmetic the inputs ask for.
template <class Call>
Status on_device(const Call& call, const core::Plan& plan) {
  const DeviceGuard guard(call.problem.device_index);
  LLA_RETURN_IF_ERROR(guard.status());
  LLA_RETURN_IF_ERROR(check_pointers(call));
  return call.problem.dtype == DType::f64 ? run<double>(call, plan) : run<float>(call, plan);
}

Status forward(const core::ForwardCall& call, const core::Plan& plan) { return on_device(call, plan); }
Status backward(const core::BackwardCall& call, const core::Plan& plan) { return on_device(call, plan); }

}  // namespace

const core::Implementation implementation = {
    .name = "cuda-portable",
    .description = "CUDA, any GPU from compute capability 8.0, every dtype and shape, f32 or f64 arithmetic",
    .device = core::Device::cuda,
    .refuse = refuse,
    .plan = plan,
    .notes = notes,
    .forward = forward,
    .backward = backward,
};

}  // namespace lla::cuda::portable
