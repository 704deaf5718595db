// The forward kernel: one persistent block per multiprocessor, a copying warpgroup and two that multiply.
#pragma once

#include "cuda/sm90/forward/consumer.cuh"
#include "cuda/sm90/forward/producer.cuh"
#include "cuda/sm90/solve/roles.cuh"

namespace lla::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                   const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& s = *reinterpret_cast<ForwardShared<Config>*>(memory);
  s.init();
  const int warpgroup = own_warpgroup();
  ForwardProducer<Config> producer{{s, p, &keys, &values, p.weights + blockIdx.x * p.weights_stride, own_warp()}};
  ForwardConsumer<Config> consumer{{{s, p, warpgroup - 1}}};
  run_roles<Config>(warpgroup, producer, consumer);
}

}  // namespace lla::cuda::sm90
