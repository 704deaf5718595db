#include "plan/machine.hpp"

#include <array>
#include <atomic>
#include <memory>

#include "plan/backends.hpp"
#if LLA_HAVE_CUDA
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
#if LLA_HAVE_CUDA
  // Probing initialises CUDA, so each device is asked once. What was found is never freed, and no lock guards it: calls
  // at exit and in forked children come here too.
  static std::array<std::atomic<const CudaDevice*>, 64> devices{};
  const auto slot = static_cast<size_t>(cuda_device_index);
  if (slot >= devices.size()) {
    m.cuda = cuda::probe(cuda_device_index);
    return m;
  }
  const CudaDevice* found = devices[slot].load(std::memory_order_acquire);
  if (found == nullptr) {
    auto probed = std::make_unique<const CudaDevice>(cuda::probe(cuda_device_index));
    if (devices[slot].compare_exchange_strong(found, probed.get(), std::memory_order_acq_rel)) found = probed.release();
  }
  m.cuda = *found;
#else
  (void)cuda_device_index;
  m.cuda.absent_reason = "this build has no CUDA";
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
