#include "cuda/common/runtime.hpp"

#include <atomic>

namespace lla::cuda {

using core::cat;

namespace {

// Faults of kernels. Nothing here waits for a kernel, so one that shows up is of work put on the device before.
bool is_fault(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable: return true;
    default: return false;
  }
}

}  // namespace

Status to_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  const lla_status code = error == cudaErrorMemoryAllocation ? LLA_OUT_OF_MEMORY : LLA_CUDA_ERROR;
  return {code, cat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")",
                    is_fault(error) ? ", of earlier work on this device; the process cannot use it any more" : "")};
}

namespace {

// What kernels are known to be allowed, by kernel and device. Never shrinks; no destructor, since calls may come while
// the process ends. Where it is full, nothing is known.
struct Allowed {
  struct Entry {
    std::atomic<uintptr_t> key;
    std::atomic<size_t> bytes;
  };
  static constexpr size_t kEntries = 1024;
  Entry entries[kEntries];

  Entry* find(uintptr_t key) {
    for (size_t i = 0; i < kEntries; ++i) {
      Entry& entry = entries[(key / 16 + i) % kEntries];
      uintptr_t found = 0;
      if (entry.key.compare_exchange_strong(found, key) || found == key) return &entry;
    }
    return nullptr;
  }
};
constinit Allowed allowed{};

}  // namespace

Status allow_shared_memory(const void* kernel, size_t bytes, const char* name, bool again) {
  if (bytes <= 48 * 1024) return {};
  int device = 0;
  LLA_RETURN_IF_ERROR(to_status(cudaGetDevice(&device), name));
  Allowed::Entry* const entry =
      allowed.find(reinterpret_cast<uintptr_t>(kernel) + (static_cast<uintptr_t>(device) << 56));
  if (!again && entry != nullptr && entry->bytes.load() >= bytes) return {};
  LLA_RETURN_IF_ERROR(to_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), name));
  if (entry != nullptr) entry->bytes.store(bytes);
  return {};
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

namespace {

// Null passes.
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

template <class Call>
Status check_common(const Call& call) {
  const int device = call.problem.device_index;
  LLA_RETURN_IF_ERROR(check_pointer(call.q.data, device, "q"));
  LLA_RETURN_IF_ERROR(check_pointer(call.k.data, device, "k"));
  LLA_RETURN_IF_ERROR(check_pointer(call.v.data, device, "v"));
  LLA_RETURN_IF_ERROR(check_pointer(call.ridge.data, device, "ridge"));
  LLA_RETURN_IF_ERROR(check_pointer(call.x.data, device, "x"));
  LLA_RETURN_IF_ERROR(check_pointer(call.saved, device, "saved"));
  LLA_RETURN_IF_ERROR(check_pointer(call.cu_seqlens_q, device, "cu_seqlens_q"));
  LLA_RETURN_IF_ERROR(check_pointer(call.cu_seqlens_k, device, "cu_seqlens_k"));
  LLA_RETURN_IF_ERROR(check_pointer(call.info.iterations, device, "iterations"));
  LLA_RETURN_IF_ERROR(check_pointer(call.info.residual, device, "residual"));
  LLA_RETURN_IF_ERROR(check_pointer(call.info.status, device, "row_status"));
  return check_pointer(call.workspace, device, "workspace");
}

}  // namespace

Status check_pointers(const core::ForwardCall& call) {
  const int device = call.problem.device_index;
  LLA_RETURN_IF_ERROR(check_common(call));
  LLA_RETURN_IF_ERROR(check_pointer(call.cache.lengths, device, "seqlens_k"));
  LLA_RETURN_IF_ERROR(check_pointer(call.cache.table, device, "page_table"));
  LLA_RETURN_IF_ERROR(check_pointer(call.cache.first_key, device, "first_key"));
  return check_pointer(call.o.data, device, "o");
}

Status check_pointers(const core::CacheAppendCall& call) {
  const int device = call.device_index;
  LLA_RETURN_IF_ERROR(check_pointer(call.k.data, device, "k"));
  LLA_RETURN_IF_ERROR(check_pointer(call.v.data, device, "v"));
  LLA_RETURN_IF_ERROR(check_pointer(call.k_cache.data, device, "k_cache"));
  LLA_RETURN_IF_ERROR(check_pointer(call.v_cache.data, device, "v_cache"));
  LLA_RETURN_IF_ERROR(check_pointer(call.cache.lengths, device, "seqlens"));
  LLA_RETURN_IF_ERROR(check_pointer(call.cache.table, device, "page_table"));
  LLA_RETURN_IF_ERROR(check_pointer(call.slots, device, "slots"));
  LLA_RETURN_IF_ERROR(check_pointer(call.cu_seqlens, device, "cu_seqlens"));
  LLA_RETURN_IF_ERROR(check_pointer(call.new_lengths, device, "new_seqlens"));
  return check_pointer(call.status, device, "status");
}

Status check_pointers(const core::BackwardCall& call) {
  const int device = call.problem.device_index;
  LLA_RETURN_IF_ERROR(check_common(call));
  LLA_RETURN_IF_ERROR(check_pointer(call.grad_o.data, device, "grad_o"));
  LLA_RETURN_IF_ERROR(check_pointer(call.dq.data, device, "dq"));
  LLA_RETURN_IF_ERROR(check_pointer(call.dk.data, device, "dk"));
  LLA_RETURN_IF_ERROR(check_pointer(call.dv.data, device, "dv"));
  LLA_RETURN_IF_ERROR(check_pointer(call.dridge.data, device, "dridge"));
  return check_pointer(call.dx.data, device, "dx");
}

}  // namespace lla::cuda
