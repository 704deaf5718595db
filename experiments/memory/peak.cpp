#include "memory/peak.hpp"

#include <malloc.h>

#include <chrono>
#include <fstream>
#include <string>

#include "common/results.hpp"

namespace lla::experiments {
namespace {

// A field of /proc/self/status, in bytes.
double status_bytes(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(field + ":", 0) == 0) return 1024 * std::stod(line.substr(field.size() + 1));
  }
  throw Failure("/proc/self/status has no " + field + ": memory cannot be measured here");
}

}  // namespace

Cost measure_cost(const std::function<void()>& f) {
  malloc_trim(0);  // what earlier measurements freed must not serve this one unseen
  std::ofstream("/proc/self/clear_refs") << "5";
  const double before = status_bytes("VmRSS");
  if (status_bytes("VmHWM") > before + (1 << 20))
    throw Failure("/proc/self/clear_refs does not reset the memory mark here");
  const auto start = std::chrono::steady_clock::now();
  f();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return {seconds, status_bytes("VmHWM") - before};
}

}  // namespace lla::experiments
