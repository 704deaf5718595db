// Thin layer over the CUDA runtime: errors as Status, launches checked, the caller's device left as it was.
#pragma once

#include <cuda_runtime_api.h>

#include "core/text.hpp"
#include "lla/lla.hpp"

namespace lla::cuda {

// `what` names the call in the message: "launching stats".
Status to_status(cudaError_t error, const char* what);

// Error of the launch just made (not of kernels still running: nothing here waits).
inline Status launched(const char* kernel) { return to_status(cudaGetLastError(), kernel); }

// Lets a kernel use `bytes` of dynamic shared memory; needed above 48 KiB.
template <class Kernel>
Status allow_shared_memory(Kernel* kernel, size_t bytes, const char* name) {
  if (bytes <= 48 * 1024) return {};
  return to_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
                   name);
}

// Makes a device current and restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;  // -1: nothing to restore
  Status status_;
};

// Fails where `pointer` is not memory that `device` can use; `name` says whose it is. Null passes.
Status check_pointer(const void* pointer, int device, const char* name);

}  // namespace lla::cuda
