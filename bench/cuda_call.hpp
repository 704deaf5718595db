// One CUDA problem with its device memory, ready to be run again and again. Throws std::runtime_error with the reason.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "bench/cuda_bench.hpp"
#include "bench/device_memory.hpp"

namespace lla::bench {

void require_cuda(int error, const char* doing);  // a cudaError_t

// Device memory that holds numbers of one type.
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t bytes);
  DeviceArray(DType dtype, const std::vector<double>& values);

  void* data() const { return memory_ ? memory_->data() : nullptr; }
  size_t bytes() const { return memory_ ? memory_->size() : 0; }
  std::vector<std::byte> copy() const;
  std::vector<double> values(DType dtype, int64_t elements) const;
  void poison();  // NaN in every floating type

 private:
  std::optional<DeviceMemory> memory_;
};

// Host copies of the inputs, dense (batch, length, heads, dim), rounded to the case's type; the ridge (batch, length,
// heads).
struct CudaInputs {
  std::vector<double> q, k, v, x, grad_o;  // grad_o: where there is a backward pass
  std::vector<double> ridge;
};
CudaInputs make_cuda_inputs(const CudaCase& c);
bool same_inputs(const CudaCase& a, const CudaCase& b);

class CudaCall {
 public:
  // out: type of o and the gradients.
  CudaCall(const CudaCase& c, const CudaInputs& inputs, DType out);

  // Iterations, tolerance and solver of the calls made from now on.
  void set_solver(Solver solver, double tolerance, int max_iterations);
  void forward();
  void backward();

  ForwardArgs& forward_args() { return forward_; }
  BackwardArgs& backward_args() { return backward_; }
  std::vector<double> o() const { return o_.values(out_, elements_); }
  std::vector<double> dq() const { return dq_.values(out_, elements_); }
  std::vector<double> dk() const { return dk_.values(out_, elements_); }
  std::vector<double> dv() const { return dv_.values(out_, elements_); }
  std::vector<double> dridge_or_dx() const;
  std::vector<double> iterations() const { return iterations_.values(DType::i32, rows_); }  // (batch, heads, length)
  void poison_outputs();
  // Every bit of o, or of the gradients: what must not change from run to run.
  std::vector<std::byte> output_bits(bool gradients) const;

 private:
  void give_workspaces();

  CudaCase case_;
  DType out_, ridge_dtype_;
  int64_t rows_, elements_;
  DeviceArray q_, k_, v_, x_, ridge_, grad_o_, o_, saved_, iterations_, dq_, dk_, dv_, dridge_, workspace_,
      backward_workspace_;
  ForwardArgs forward_;
  BackwardArgs backward_;
};

}  // namespace lla::bench
