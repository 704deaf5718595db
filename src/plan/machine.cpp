#include "plan/machine.hpp"

#include <map>
#include <mutex>

#include "plan/backends.hpp"
#if LLA_HAVE_CUDA && __has_include("cuda/common/device.hpp")
#include "cuda/common/device.hpp"
#endif

namespace lla::core {

Machine this_cpu() {
  Machine m;
  m.threads = cpu::num_threads();
  m.simd = cpu::simd_target_name();
  return m;
}

Machine this_machine(int cuda_device_index) {
  Machine m = this_cpu();
#if LLA_HAVE_CUDA && __has_include("cuda/common/device.hpp")
  // Probing initialises CUDA, so each device is asked once.
  static std::mutex mutex;
  static std::map<int, CudaDevice> devices;
  const std::lock_guard lock(mutex);
  auto found = devices.find(cuda_device_index);
  if (found == devices.end()) found = devices.emplace(cuda_device_index, cuda::probe(cuda_device_index)).first;
  m.cuda = found->second;
#else
  (void)cuda_device_index;
#endif
  return m;
}

Machine h200() {
  Machine m;
  m.threads = 16;
  m.cuda = {.present = true,
            .absent_reason = "",
            .name = "NVIDIA H200",
            .arch = 90,
            .multiprocessors = 132,
            .shared_memory_per_block = 227 * 1024,
            .l2_bytes = int64_t{60} << 20};
  return m;
}

}  // namespace lla::core
