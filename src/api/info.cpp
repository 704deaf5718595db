// Entry points that describe the library and the machine.
#include <string>

#include "api/last_error.hpp"
#include "core/text.hpp"
#include "lla/lla.h"
#include "plan/backends.hpp"
#include "plan/implementation.hpp"

using namespace lla::core;

namespace {

const Implementation* implementation(int32_t index) {
  const auto list = implementations();
  return index >= 0 && static_cast<size_t>(index) < list.size() ? list[index] : nullptr;
}

std::string describe(const Machine& m) {
  const std::string cpu = cat("CPU: ", m.simd, ", ", m.threads, m.threads == 1 ? " thread" : " threads", "\n");
  if (!m.cuda.present) return cpu + cat("CUDA: none (", m.cuda.absent_reason, ")\n");
  return cpu + cat("CUDA: ", m.cuda.name, ", sm_", m.cuda.arch, ", ", m.cuda.multiprocessors, " multiprocessors, ",
                   m.cuda.l2_bytes >> 20, " MiB L2\n");
}

}  // namespace

extern "C" {

#define LLA_TEXT(x) #x
#define LLA_VERSION_TEXT(a, b, c) LLA_TEXT(a) "." LLA_TEXT(b) "." LLA_TEXT(c)

const char* lla_version(void) { return LLA_VERSION_TEXT(LLA_VERSION_MAJOR, LLA_VERSION_MINOR, LLA_VERSION_PATCH); }

const char* lla_status_name(lla_status status) {
  switch (status) {
    case LLA_OK: return "OK";
    case LLA_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case LLA_UNSUPPORTED: return "UNSUPPORTED";
    case LLA_WORKSPACE_TOO_SMALL: return "WORKSPACE_TOO_SMALL";
    case LLA_OUT_OF_MEMORY: return "OUT_OF_MEMORY";
    case LLA_CUDA_ERROR: return "CUDA_ERROR";
    case LLA_INTERNAL: return "INTERNAL";
  }
  return "UNKNOWN";
}

const char* lla_implementation_name(int32_t index) {
  const Implementation* i = implementation(index);
  return i ? i->name : nullptr;
}

const char* lla_implementation_description(int32_t index) {
  const Implementation* i = implementation(index);
  return i ? i->description : nullptr;
}

const char* lla_machine_description(void) {
  thread_local char text[1024];  // no destructor: see last_error.cpp
  try {
    const std::string made = describe(this_machine(0));
    text[made.copy(text, sizeof text - 1)] = '\0';
  } catch (...) {
    return "";
  }
  return text;
}

lla_status lla_set_num_threads(int32_t threads) {
  return guarded([&]() -> lla::Status {
    if (threads < 0) return invalid(cat("threads: ", threads, " must be at least 0 (0: the default)"));
    lla::cpu::set_num_threads(threads);
    return {};
  });
}

int32_t lla_get_num_threads(void) { return lla::cpu::num_threads(); }

}  // extern "C"
