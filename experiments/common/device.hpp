// Where the attention runs, and memory there. The CUDA half is compiled only where the kernels are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace lla::experiments {

enum class Device { cpu, cuda };

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual Device device() const = 0;
  virtual void* allocate(size_t bytes) = 0;  // 256-byte aligned; throws Failure when there is not enough
  virtual void release(void* p) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  virtual void synchronize() = 0;
};

// Throws Failure, with the reason, where the device is not there or not in this build.
std::unique_ptr<DeviceMemory> open_device(Device);

// A block of device memory that grows when asked for more and is given back at the end.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(DeviceMemory& memory) : memory_(&memory) {}
  ~DeviceBuffer() { memory_->release(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* require(size_t bytes) {
    if (bytes > bytes_) {
      memory_->release(data_);
      data_ = nullptr, bytes_ = 0;
      data_ = memory_->allocate(bytes), bytes_ = bytes;
    }
    return data_;
  }

 private:
  DeviceMemory* memory_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace lla::experiments
