// A plain run of bytes into shared memory by the copy engine.
#pragma once

#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90 {

// Of bytes that are read once in a while and should not push others out of L2. Both addresses and `bytes` are multiples
// of 16; the bytes count towards `barrier`.
__device__ __forceinline__ void load_bytes_once(void* to, const void* from, uint32_t bytes, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier.word)), "l"(kEvictFirst)
      : "memory");
}

}  // namespace lla::cuda::sm90
