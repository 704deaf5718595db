#include "api/last_error.hpp"

#include <cstring>

namespace lla::core {
namespace {

// Plain memory of the thread: needs no allocation when memory is what ran out, and has no destructor that a call from a
// static destructor would come too late for. A longer message is cut.
constexpr size_t kCapacity = 2048;
thread_local char last_error[kCapacity];

}  // namespace

void set_last_error(const char* message) noexcept {
  const size_t length = strnlen(message, kCapacity - 1);
  std::memcpy(last_error, message, length);
  last_error[length] = '\0';
}

}  // namespace lla::core

const char* lla_last_error(void) { return lla::core::last_error; }
