// The kernel for a given x: one persistent block per multiprocessor, a producer warpgroup and two consumers.
#pragma once

#include "cuda/sm90/given_x/consumer.cuh"
#include "cuda/sm90/given_x/producer.cuh"

namespace lla::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    given_x_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                   const __grid_constant__ ForwardParams params) {
  auto& shared = *reinterpret_cast<GivenXShared<Config>*>(dynamic_tiles);
  shared.init();
  wait_for_last_kernel();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);  // known to be uniform
  if (warpgroup == 0) {
    give_registers<Config::kProducerRegisters>();
    if (threadIdx.x == 0) {
      prefetch_map(&keys);
      prefetch_map(&values);
      GivenXProducer<Config>{shared, params, &keys, &values}.run();
    }
  } else {
    take_registers<Config::kConsumerRegisters>();
    GivenXConsumer<Config>{shared, params, warpgroup - 1}.run();
  }
}

}  // namespace lla::cuda::sm90
