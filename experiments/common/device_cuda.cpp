#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "common/device.hpp"
#include "common/results.hpp"

namespace lla::experiments {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Failure(fmt::format("CUDA: {} failed: {}", what, cudaGetErrorString(error)));
}

class Cuda final : public DeviceMemory {
 public:
  Device device() const override { return Device::cuda; }
  void* allocate(size_t bytes) override {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes), "allocating memory");
    return p;
  }
  void release(void* p) override { cudaFree(p); }
  void upload(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the device");
  }
  void download(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copying from the device");
  }
  void synchronize() override { check(cudaDeviceSynchronize(), "waiting for the device"); }
};

}  // namespace

std::unique_ptr<DeviceMemory> open_cuda() { return std::make_unique<Cuda>(); }

}  // namespace lla::experiments
