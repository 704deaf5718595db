// Thin layer over the CUDA runtime: errors as Status, launches checked, the caller's device left as it was.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cache_append.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "lla/lla.hpp"

namespace lla::cuda {

// `what` names the call in the message: "launching stats". The runtime keeps the error of a failed call for whoever
// asks next: it is taken back, so that the caller's next check does not find ours.
Status to_status(cudaError_t error, const char* what);

// Lets a kernel use `bytes` of dynamic shared memory, which above 48 KiB it must be told. Asked for only where it is
// not known to be allowed yet, or `again`: the runtime's call takes away the error that an earlier call of the program
// has left for it to find.
Status allow_shared_memory(const void* kernel, size_t bytes, const char* name, bool again = false);

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

// Fails where a tensor's data or the workspace is not memory that the call's device can use, and names it: the kernels
// would fault, and a fault costs the process its CUDA context.
Status check_pointers(const core::ForwardCall& call);
Status check_pointers(const core::BackwardCall& call);
Status check_pointers(const core::CacheAppendCall& call);

}  // namespace lla::cuda
