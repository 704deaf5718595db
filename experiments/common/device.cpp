#include "common/device.hpp"

#include <cstring>
#include <new>

#include <unistd.h>

#include <fmt/core.h>

#include "common/results.hpp"
#include "plan/machine.hpp"

namespace lla::experiments {
namespace {

class Host final : public DeviceMemory {
 public:
  Device device() const override { return Device::cpu; }
  void* allocate(size_t bytes) override {
    void* p = ::operator new(bytes, kAlignment, std::nothrow);
    if (p == nullptr) throw Failure(fmt::format("not enough memory for {} MiB", bytes >> 20));
    return p;
  }
  void release(void* p) override { ::operator delete(p, kAlignment); }
  void* allocate_host(size_t bytes) override { return allocate(bytes); }
  void release_host(void* p) override { release(p); }
  void upload(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void* stream() const override { return nullptr; }
  void synchronize() override {}
  size_t free_bytes() override { return size_t(sysconf(_SC_AVPHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE)); }

 private:
  static constexpr std::align_val_t kAlignment{256};
};

}  // namespace

#if LLA_EXPERIMENTS_CUDA
std::unique_ptr<DeviceMemory> open_cuda();  // device_cuda.cpp
#else
static std::unique_ptr<DeviceMemory> open_cuda() { return nullptr; }
#endif

std::unique_ptr<DeviceMemory> open_device(Device device) {
  if (device == Device::cpu) return std::make_unique<Host>();
  const core::CudaDevice cuda = core::this_machine(0).cuda;
  if (!cuda.present) throw Failure(fmt::format("--device cuda cannot be used: {}", cuda.absent_reason));
  return open_cuda();
}

}  // namespace lla::experiments
