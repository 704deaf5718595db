#include "support/memory.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace lla::test {
namespace {

constexpr std::align_val_t kAlignment{256};

class HostMemory : public Memory {
 public:
  void* allocate(size_t bytes) override { return ::operator new(bytes, kAlignment); }
  void release(void* memory) override { ::operator delete(memory, kAlignment); }
  void write(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void read(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);  // an empty vector's data may be null
  }
};

Memory* registered_cuda_memory = nullptr;

}  // namespace

Memory& host_memory() {
  static HostMemory memory;
  return memory;
}

void register_cuda_memory(Memory* memory) { registered_cuda_memory = memory; }
Memory* cuda_memory() { return registered_cuda_memory; }

GuardedBuffer::GuardedBuffer(Memory& memory, size_t bytes)
    : memory_(memory), bytes_(bytes), base_(static_cast<uint8_t*>(memory.allocate(bytes + 2 * kGuard))) {
  const std::vector<uint8_t> poison(bytes + 2 * kGuard, kPoison);
  memory_.write(base_, poison.data(), poison.size());
}

GuardedBuffer::~GuardedBuffer() { memory_.release(base_); }

void* GuardedBuffer::data() const { return base_ + kGuard; }

void GuardedBuffer::write(const std::vector<uint8_t>& body) {
  memory_.write(base_ + kGuard, body.data(), std::min(body.size(), bytes_));
}

std::vector<uint8_t> GuardedBuffer::read() const {
  std::vector<uint8_t> body(bytes_);
  memory_.read(body.data(), base_ + kGuard, bytes_);
  return body;
}

bool GuardedBuffer::guards_intact() const {
  std::vector<uint8_t> guards(2 * kGuard);
  memory_.read(guards.data(), base_, kGuard);
  memory_.read(guards.data() + kGuard, base_ + kGuard + bytes_, kGuard);
  return std::all_of(guards.begin(), guards.end(), [](uint8_t byte) { return byte == kPoison; });
}

}  // namespace lla::test
