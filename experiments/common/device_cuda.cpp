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
  Cuda() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"); }
  ~Cuda() override { cudaStreamDestroy(stream_); }
  Device device() const override { return Device::cuda; }
  void* allocate(size_t bytes) override {
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error != cudaSuccess) cudaGetLastError();  // a refusal is no lasting error
    check(error, "allocating memory");
    return p;
  }
  void release(void* p) override { cudaFree(p); }
  void* allocate_host(size_t bytes) override {
    void* p = nullptr;
    check(cudaMallocHost(&p, bytes), "allocating page-locked host memory");
    return p;
  }
  void release_host(void* p) override { cudaFreeHost(p); }
  void upload(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "copying to the device");
  }
  void download(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the device");
  }
  void* stream() const override { return stream_; }
  void synchronize() override { check(cudaStreamSynchronize(stream_), "waiting for the device"); }
  size_t free_bytes() override {
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "asking for the free memory");
    return free;
  }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

std::unique_ptr<DeviceMemory> open_cuda() { return std::make_unique<Cuda>(); }

}  // namespace lla::experiments
