// Where test tensors live. The host's is built in; a test binary for a GPU registers that device's memory and then runs
// the same tests on its implementations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lla::test {

class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(size_t bytes) = 0;  // 256-byte aligned
  virtual void release(void* memory) = 0;
  virtual void write(void* to, const void* from_host, size_t bytes) = 0;
  virtual void read(void* to_host, const void* from, size_t bytes) = 0;
  virtual void synchronize() {}
  virtual int cuda_device() const { return -1; }  // ordinal, or -1 for the host
};

Memory& host_memory();
// The memory CUDA implementations are tested in; without one they are left out. Not owned.
void register_cuda_memory(Memory* memory);
Memory* cuda_memory();

// Bytes between two guard zones, all of it filled with 0xFF: a NaN in every floating type.
class GuardedBuffer {
 public:
  GuardedBuffer(Memory& memory, size_t bytes);
  ~GuardedBuffer();
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  void* data() const;
  size_t size() const { return bytes_; }
  void write(const std::vector<uint8_t>& body);
  std::vector<uint8_t> read() const;  // the body
  bool guards_intact() const;

 private:
  static constexpr size_t kGuard = 1024;  // a multiple of the alignment
  Memory& memory_;
  size_t bytes_;
  uint8_t* base_;
};

constexpr uint8_t kPoison = 0xFF;

}  // namespace lla::test
