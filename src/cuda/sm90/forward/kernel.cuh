// The forward kernel: one persistent block per multiprocessor, a copying warpgroup and two that multiply.
#pragma once

#include "cuda/sm90/forward/consumer.cuh"
#include "cuda/sm90/forward/producer.cuh"

namespace lla::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                   const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& s = *reinterpret_cast<ForwardShared<Config>*>(memory);
  s.init();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    give_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) {
      prefetch_map(&keys);
      prefetch_map(&values);
      Producer<Config> producer{s, p, &keys, &values, p.weights + blockIdx.x * p.weights_stride};
      producer.take_items([&](int64_t item, int parity) { producer.run_item(item, parity); });
    }
  } else {
    take_registers<Config::kConsumerRegisters>();
    Consumer<Config> consumer{s, p, warpgroup - 1};
    // Left to the compiler, a body of this size would become a function, and a call in it serialises all products.
    consumer.take_items([&]() __attribute__((always_inline)) { consumer.run_item(); });
  }
}

}  // namespace lla::cuda::sm90
