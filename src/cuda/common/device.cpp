#include "cuda/common/device.hpp"

#include <cuda_runtime_api.h>

#include "core/text.hpp"

namespace lla::cuda {
namespace {

using core::cat;

std::string version_text(int version) { return cat(version / 1000, ".", version % 1000 / 10); }

// Why the runtime found no devices at all.
std::string no_devices_reason(cudaError_t error) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no CUDA driver is installed";
  if (error == cudaErrorInsufficientDriver && cudaRuntimeGetVersion(&runtime) == cudaSuccess) {
    return cat("the CUDA driver supports CUDA ", version_text(driver), ", this build needs ", version_text(runtime));
  }
  if (error == cudaErrorNoDevice || error == cudaSuccess) return "the CUDA driver shows no device";
  return cat("CUDA could not be initialised: ", cudaGetErrorString(error));
}

core::CudaDevice absent(std::string reason) {
  cudaGetLastError();  // a failed question must not show up as the error of a later launch
  core::CudaDevice device;
  device.absent_reason = std::move(reason);
  return device;
}

}  // namespace

core::CudaDevice probe(int device_index) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) return absent(no_devices_reason(counted));
  if (device_index < 0 || device_index >= count) {
    return absent(cat("device ", device_index, " is not one of the ", count, " CUDA devices"));
  }
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device_index); error != cudaSuccess) {
    return absent(cat("device ", device_index, " gave no properties: ", cudaGetErrorString(error)));
  }
  core::CudaDevice device;
  device.name = properties.name;
  device.arch = properties.major * 10 + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_memory_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  device.l2_bytes = properties.l2CacheSize;
  if (device.arch < kOldestArch) {
    device.absent_reason = cat(device.name, " has compute capability ", properties.major, ".", properties.minor,
                               ", the kernels need ", kOldestArch / 10, ".", kOldestArch % 10);
    return device;
  }
  device.present = true;
  device.absent_reason.clear();
  return device;
}

}  // namespace lla::cuda
