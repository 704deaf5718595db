// Between torch's stable tensors and the views of lla.h: metadata only, no copies.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

#include "lla/lla.h"

namespace lla::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error naming `name` when the tensor has a type or a device lla.h has no name for.
lla_tensor view(const Tensor& tensor, const char* name);
lla_tensor view(const std::optional<Tensor>& tensor, const char* name);

// A new dense tensor on the device of `like`.
Tensor empty(std::initializer_list<int64_t> size, ScalarType dtype, const Tensor& like);
Tensor empty(const int64_t* size, int64_t dims, ScalarType dtype, const Tensor& like);
Tensor empty_cpu(int64_t bytes);        // uint8
Tensor empty_like(const Tensor& like);  // its size and type, dense

// Memory from torch's allocator (the caching one on CUDA), aligned as lla.h asks; freed, stream-ordered, with this
// object.
class Workspace {
 public:
  Workspace(size_t bytes, const Tensor& like);
  void* data() const { return data_; }

 private:
  std::optional<Tensor> memory_;
  void* data_ = nullptr;
};

// The current stream of a CUDA tensor's device, nullptr for the CPU.
void* current_stream(const Tensor& tensor);

// CPU calls use as many threads as torch does.
void adopt_torch_threads();

}  // namespace lla::torch_ops
