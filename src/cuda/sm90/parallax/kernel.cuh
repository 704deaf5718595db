// The kernel for a given x: one persistent block per multiprocessor, a copying warpgroup and two that multiply.
#pragma once

#include "cuda/sm90/parallax/consumer.cuh"
#include "cuda/sm90/parallax/producer.cuh"

namespace lla::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    parallax_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                    const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& s = *reinterpret_cast<ParallaxShared<Config>*>(memory);
  s.init();
  wait_for_last_kernel();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    give_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) {
      prefetch_map(&keys);
      prefetch_map(&values);
      ParallaxProducer<Config>{s, p, &keys, &values}.run();
    }
  } else {
    take_registers<Config::kConsumerRegisters>();
    ParallaxConsumer<Config>{s, p, warpgroup - 1}.run();
  }
}

}  // namespace lla::cuda::sm90
