#include "bench/device_memory.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#if LLA_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lla::bench {
namespace {

constexpr std::align_val_t kAlignment{256};

void* allocate_host(size_t bytes) { return ::operator new(bytes, kAlignment); }
void release_host(void* block) { ::operator delete(block, kAlignment); }

#if LLA_HAVE_CUDA
void require(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + doing + ": " + cudaGetErrorString(error));
}
void* allocate_cuda(size_t bytes) {
  void* block = nullptr;
  require(cudaMalloc(&block, std::max<size_t>(bytes, 1)), "allocating memory");
  return block;
}
void release_cuda(void* block) { cudaFree(block); }
#else
[[noreturn]] void no_cuda() { throw std::runtime_error("this build has no CUDA"); }
void* allocate_cuda(size_t) { no_cuda(); }
void release_cuda(void*) {}
#endif

}  // namespace

DeviceMemory::DeviceMemory(core::Device device, size_t bytes)
    : device_(device),
      bytes_(bytes),
      block_(device == core::Device::cpu ? allocate_host(bytes) : allocate_cuda(bytes),
             device == core::Device::cpu ? release_host : release_cuda) {}

void DeviceMemory::fill(unsigned char byte) {
  if (device_ == core::Device::cpu) {
    std::memset(data(), byte, bytes_);
    return;
  }
#if LLA_HAVE_CUDA
  require(cudaMemset(data(), byte, bytes_), "filling memory");
#endif
}

void DeviceMemory::upload(size_t offset, const void* from_host, size_t bytes) {
  void* const to = static_cast<char*>(data()) + offset;
  if (device_ == core::Device::cpu) {
    std::memcpy(to, from_host, bytes);
    return;
  }
#if LLA_HAVE_CUDA
  require(cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice), "copying to the device");
#endif
}

void DeviceMemory::download(void* to_host) const {
  if (device_ == core::Device::cpu) {
    std::memcpy(to_host, data(), bytes_);
    return;
  }
#if LLA_HAVE_CUDA
  require(cudaMemcpy(to_host, data(), bytes_, cudaMemcpyDeviceToHost), "copying from the device");
#endif
}

void synchronize([[maybe_unused]] core::Device device) {
#if LLA_HAVE_CUDA
  if (device == core::Device::cuda) require(cudaDeviceSynchronize(), "waiting for the device");
#endif
}

}  // namespace lla::bench
