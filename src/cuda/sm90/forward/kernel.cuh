// The forward kernel: one persistent block per multiprocessor, a producer warpgroup and two consumers.
#pragma once

#include "cuda/sm90/forward/consumer.cuh"
#include "cuda/sm90/forward/producer.cuh"
#include "cuda/sm90/solve/roles.cuh"

namespace lla::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                   const __grid_constant__ ForwardParams params) {
  auto& shared = *reinterpret_cast<ForwardShared<Config>*>(dynamic_tiles);
  shared.init();
  wait_for_last_kernel();
  const int warpgroup = own_warpgroup();
  ForwardProducer<Config> producer{
      {shared, params, &keys, &values, params.weights + blockIdx.x * params.weights_stride, own_warp()}};
  ForwardConsumer<Config> consumer{{{shared, params, warpgroup - 1}}};
  run_roles<Config>(warpgroup, producer, consumer);
}

}  // namespace lla::cuda::sm90
