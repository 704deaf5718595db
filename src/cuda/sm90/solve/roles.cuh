// How the warps of a persistent block share its work.
#pragma once

#include <cuda.h>

#include "cuda/sm90/ptx.cuh"
#include "cuda/tensor/fragment.cuh"

namespace lla::cuda::sm90 {

__device__ __forceinline__ int own_warpgroup() { return uniform(threadIdx.x / kWarpgroupThreads); }
__device__ __forceinline__ int own_warp() { return uniform(threadIdx.x / 32); }

// What every block of a persistent kernel does: takes items until there are none, a thread of the first warpgroup for
// each of the others. Roles are one branch of a single if, as moving registers between them wants.
template <class Config, class ProducerRole, class ConsumerRole>
__device__ __forceinline__ void run_roles(int warpgroup, ProducerRole& producer, ConsumerRole& consumer) {
  if (warpgroup == 0) {
    give_registers<Config::kProducerRegisters>();
    if (producer.warpgroup >= Config::kWarpgroups || !elected()) return;
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

}  // namespace lla::cuda::sm90
