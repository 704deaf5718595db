// How an entry point begins and ends: in the library's floating-point environment, and whatever comes out of its body
// becomes a status code and this thread's last error.
#pragma once

#include <exception>
#include <new>

#include "core/float_environment.hpp"
#include "lla/lla.hpp"

namespace lla::core {

void set_last_error(const char* message) noexcept;

template <class Body>
lla_status guarded(Body&& body) noexcept {
  const FloatEnvironment floats;
  try {
    const Status status = body();
    set_last_error(status.message().c_str());
    return status.code();
  } catch (const std::bad_alloc&) {
    set_last_error("out of host memory");
    return LLA_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    set_last_error(e.what());
  } catch (...) {
    set_last_error("unknown exception");
  }
  return LLA_INTERNAL;
}

}  // namespace lla::core
