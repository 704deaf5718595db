#include "cuda/common/runtime.hpp"

namespace lla::cuda {

using core::cat;

Status to_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {LLA_CUDA_ERROR, cat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")")};
}

DeviceGuard::DeviceGuard(int device) {
  int current = 0;
  status_ = to_status(cudaGetDevice(&current), "asking for the current device");
  if (!status_ || current == device) return;
  status_ = to_status(cudaSetDevice(device), "selecting the device");
  if (status_) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

Status check_pointer(const void* pointer, int device, const char* name) {
  if (pointer == nullptr) return {};
  cudaPointerAttributes attributes;
  LLA_RETURN_IF_ERROR(to_status(cudaPointerGetAttributes(&attributes, pointer), name));
  switch (attributes.type) {
    case cudaMemoryTypeManaged:
    case cudaMemoryTypeHost: return {};  // pinned host memory is slow but works
    case cudaMemoryTypeDevice:
      if (attributes.device == device) return {};
      return core::invalid(cat(name, ": the data is on CUDA device ", attributes.device, ", the tensor says ", device));
    default: return core::invalid(cat(name, ": the pointer is host memory, the tensor says CUDA device ", device));
  }
}

}  // namespace lla::cuda
