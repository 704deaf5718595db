// A block of memory on the device an implementation works on, filled from and read back to the host.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/problem.hpp"

namespace lla::bench {

class DeviceMemory {
 public:
  // Throws std::runtime_error with the reason when there is not enough, or no such device in this build.
  DeviceMemory(core::Device device, size_t bytes);

  void* data() const { return block_.get(); }
  size_t size() const { return bytes_; }
  void fill(unsigned char byte);
  void upload(const void* from_host) { upload(0, from_host, bytes_); }
  void upload(size_t offset, const void* from_host, size_t bytes);
  void download(void* to_host) const;

 private:
  core::Device device_;
  size_t bytes_;
  std::unique_ptr<void, void (*)(void*)> block_;
};

// Waits until the device has finished; throws with the reason when it has failed.
void synchronize(core::Device device);

}  // namespace lla::bench
