#include "gpu/gpu_test.hpp"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <stdexcept>

#include "plan/implementation.hpp"

namespace lla::test {
namespace {

void require(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(error));
}

class CudaMemory : public Memory {
 public:
  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    require(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
    return memory;
  }
  void release(void* memory) override { cudaFree(memory); }
  void write(void* to, const void* from_host, size_t bytes) override {
    require(cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice), "copying to the device");
  }
  void read(void* to_host, const void* from, size_t bytes) override {
    require(cudaMemcpy(to_host, from, bytes, cudaMemcpyDeviceToHost), "copying from the device");
  }
  void synchronize() override { require(cudaDeviceSynchronize(), "waiting for the device"); }
  int cuda_device() const override { return gpu_index(); }
};

}  // namespace

int gpu_index() {
  const char* index = std::getenv("LLA_TEST_DEVICE");
  return index != nullptr ? std::atoi(index) : 0;
}

const core::CudaDevice& gpu() {
  static const core::CudaDevice device = core::this_machine(gpu_index()).cuda;
  return device;
}

std::unique_ptr<Memory> make_cuda_memory() {
  require(cudaSetDevice(gpu_index()), "selecting the device");
  return std::make_unique<CudaMemory>();
}

std::vector<std::string> cuda_implementations() {
  std::vector<std::string> names;
  for (const core::Implementation* i : core::implementations()) {
    if (i->device == core::Device::cuda) names.emplace_back(i->name);
  }
  return names;
}

Forward gpu_oracle_forward(const Spec& spec, const Inputs& inputs) {
  return run_forward(as_oracle(spec), inputs, "cuda-portable", {.saved = false, .info = false});
}

Backward gpu_oracle_backward(const Spec& spec, const Inputs& inputs) {
  return run_backward(as_oracle(spec), inputs, "cuda-portable");
}

// Says why nothing was tested where there is no device: a skip that stands in the report.
TEST(Gpu, IsPresent) {
  if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  SUCCEED() << gpu().name;
}

}  // namespace lla::test

int main(int argc, char** argv) {
  std::unique_ptr<lla::test::Memory> memory;
  if (lla::test::gpu().present) {
    memory = lla::test::make_cuda_memory();
    lla::test::register_cuda_memory(memory.get());
  }
  testing::InitGoogleTest(&argc, argv);
  // The shared suites name every implementation they find; those of the CPU have binaries of their own, and without a
  // device nothing else would be left of those suites.
  if (testing::GTEST_FLAG(filter) == "*") {
    testing::GTEST_FLAG(filter) = memory ? "-*/cpu:*/cpu_*:*/reference*" : "Gpu*:PortableHost*";
  }
  return RUN_ALL_TESTS();
}
