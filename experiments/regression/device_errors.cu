// A warp a row, sums in double.
#include <stdexcept>
#include <string>

#include "regression/device_errors.hpp"

namespace lla::experiments {
namespace {

constexpr int kWarps = 8;

__global__ void squared_errors_kernel(ErrorRows e) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.y;
  if (row >= e.sequences * e.rows) return;
  const int64_t sequence = row / e.rows, i = row % e.rows;
  const float* output = e.output + sequence * e.output_stride + i * e.d;
  const float* target = e.target + sequence * e.target_stride + i * e.d;
  double sum = 0;
  for (int64_t j = threadIdx.x; j < e.d; j += 32) {
    const double difference = double(output[j]) - double(target[j]);
    sum += difference * difference;
  }
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (threadIdx.x == 0) e.errors[sequence * e.errors_stride + i] = sum;
}

}  // namespace

void device_squared_errors(DeviceMemory& memory, const ErrorRows& e) {
  const int64_t blocks = (e.sequences * e.rows + kWarps - 1) / kWarps;
  squared_errors_kernel<<<static_cast<unsigned>(blocks), dim3(32, kWarps), 0,
                          static_cast<cudaStream_t>(memory.stream())>>>(e);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: comparing outputs failed: ") + cudaGetErrorString(error));
  }
}

}  // namespace lla::experiments
