// The forward kernel: one persistent block per multiprocessor, a copying warpgroup and two that multiply.
#pragma once

#include "cuda/sm90/forward/consumer.cuh"
#include "cuda/sm90/forward/producer.cuh"

namespace lla::cuda::sm90 {

__device__ __forceinline__ int own_warpgroup() { return uniform(threadIdx.x / kWarpgroup); }
__device__ __forceinline__ int own_warp() { return uniform(threadIdx.x / 32); }

// What every block of a persistent kernel does: takes items until there are none, a thread of the first warpgroup for
// each of the others. Roles are one branch of a single if, as moving registers between them wants.
template <class Config, class ProducerRole, class ConsumerRole>
__device__ __forceinline__ void run_roles(int warpgroup, ProducerRole& producer, ConsumerRole& consumer) {
  if (warpgroup == 0) {
    give_registers<Config::kProducerRegisters>();
    if (producer.group >= Config::kGroups || !elected()) return;
    prefetch_map(producer.keys);
    prefetch_map(producer.values);
    for (uint32_t turn = 0;; ++turn) {
      if (!producer.next_item(turn)) return;
      producer.run_item(turn & 1);
    }
  } else {
    take_registers<Config::kConsumerRegisters>();
    for (uint32_t turn = 0; consumer.begin_item(turn); ++turn) {
      consumer.run_item();
      consumer.end_item();
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                   const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& s = *reinterpret_cast<ForwardShared<Config>*>(memory);
  s.init();
  const int warpgroup = own_warpgroup();
  Producer<Config> producer{s, p, &keys, &values, p.weights + blockIdx.x * p.weights_stride, own_warp()};
  Consumer<Config> consumer{{s, p, warpgroup - 1}};
  run_roles<Config>(warpgroup, producer, consumer);
}

}  // namespace lla::cuda::sm90
