// Where the attention runs, and memory there. The CUDA half is compiled only where the kernels are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace lla::experiments {

enum class Device { cpu, cuda };

// One device and a queue of work on it. Opened twice, the two queues run beside each other.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual Device device() const = 0;
  virtual void* allocate(size_t bytes) = 0;  // 256-byte aligned; throws Failure when there is not enough
  virtual void release(void* p) = 0;
  // Host memory that copies need not be staged through: only from there do they run beside the computation.
  virtual void* allocate_host(size_t bytes) = 0;
  virtual void release_host(void* p) = 0;
  // Enqueued: host memory must stay as it is until synchronize().
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  virtual void* stream() const = 0;  // for the library's calls
  virtual void synchronize() = 0;    // waits for this queue
  virtual size_t free_bytes() = 0;   // left on the device, as it counts them
  int index() const { return device() == Device::cuda ? 0 : -1; }
};

// Throws Failure, with the reason, where the device is not there or not in this build.
std::unique_ptr<DeviceMemory> open_device(Device);

// A block of device memory, or of host memory for copies, that grows when asked for more and is given back at the end.
class DeviceBuffer {
 public:
  enum class Where { device, host };
  explicit DeviceBuffer(DeviceMemory& memory, Where where = Where::device) : memory_(&memory), where_(where) {}
  ~DeviceBuffer() { release(); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* require(size_t bytes) {
    if (bytes > bytes_) {
      release();
      data_ = where_ == Where::device ? memory_->allocate(bytes) : memory_->allocate_host(bytes);
      bytes_ = bytes;
    }
    return data_;
  }
  template <class T>
  T* require_as(size_t count) {
    return static_cast<T*>(require(count * sizeof(T)));
  }
  size_t size() const { return bytes_; }
  void release() {
    if (data_ == nullptr) return;
    where_ == Where::device ? memory_->release(data_) : memory_->release_host(data_);
    data_ = nullptr, bytes_ = 0;
  }

 private:
  DeviceMemory* memory_;
  Where where_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace lla::experiments
