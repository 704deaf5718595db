#include "cuda/common/launch.cuh"
#include "cuda/common/padding.hpp"

namespace lla::cuda {
namespace {

constexpr int kThreads = 256;
// Enough to fill memory at its speed where there is a lot to zero; mostly there is nothing, and every block ends at
// once.
constexpr int kBlocks = 256;

__device__ void zero_element(void* data, int64_t at, int32_t width) {
  switch (width) {
    case 2: static_cast<uint16_t*>(data)[at] = 0; break;
    case 4: static_cast<uint32_t*>(data)[at] = 0; break;
    default: static_cast<uint64_t*>(data)[at] = 0; break;
  }
}

__global__ void __launch_bounds__(kThreads) zero_padding_kernel(const __grid_constant__ core::Padding padding) {
  for (int i = 0; i < padding.count; ++i) {
    const core::PaddedRows& t = padding.rows[i];
    const int64_t first = core::padding_start(padding, t);
    const int64_t elements = (t.total - first) * t.heads * t.channels;  // none, or negative where cu_seqlens is wrong
    for (int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x; n < elements; n += int64_t{kBlocks} * kThreads) {
      const int64_t row = n / t.channels;
      zero_element(t.data, (first + row / t.heads) * t.position + row % t.heads * t.head + n % t.channels * t.channel,
                   t.width);
    }
  }
}

}  // namespace

Status zero_padding(const core::Padding& padding, int device, void* stream) {
  if (padding.count == 0) return {};
  const DeviceGuard guard(device);
  LLA_RETURN_IF_ERROR(guard.status());
  return launch(zero_padding_kernel, kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream),
                "zeroing what lies behind the last sequence", padding);
}

}  // namespace lla::cuda
