// The streaming kernel: one pass over the cache, a partial sum per unit.
#pragma once

#include "cuda/sm90/decode/multiply.cuh"
#include "cuda/sm90/decode/unit.cuh"

namespace lla::cuda::sm90::decode {

template <class C>
__device__ __forceinline__ void convert(Shared<C>& s, const Params& p, int thread) {
  Converter<C> c(s, p, thread);
  Ring<C, Shared<C>> ring{s, c.warp};
  if (c.warp == 0) {
    const Walk start = find_start(p, blockIdx.x);
    if (c.lane == 0) s.walk = start;
  }
  uint32_t tiles_done = 0, fills = 0, attempts = 0;
  if (thread == 0) {
    s.row.local = -1;
    take_unit(s, p, s.units[0]);
  }
  converters_sync<C>();
  Ahead ahead;
  for (int n = 0; s.units[n % 2].local >= 0; ++n) {
    run_unit<C>(c, ring, n, ahead, tiles_done, fills, attempts);
    converters_sync<C>();
  }
  if (static_cast<uint32_t>(c.warpgroup) == tiles_done % C::kConverterWarpgroups) {
    s.empty[c.warpgroup].wait((fills & 1) ^ 1);
    if (c.lane == 0 && c.warp % 4 == 0) s.head[c.warpgroup].flags = kStop;
    __syncwarp();
    s.full[c.warpgroup].arrive_for_warp();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) stream_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<C>& s = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kConverterWarpgroups; ++i) {
      s.full[i].init(4 * kWarpArrivals);
      s.empty[i].init(4 * C::kMultipliers * kWarpArrivals);
    }
    s.finished.init(4 * C::kMultipliers * kWarpArrivals);
    for (int i = 0; i < C::kWarps * C::kRawSlots; ++i) s.loaded[0][i].init(1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_last_kernel();
  let_next_kernel_begin();
  const int warpgroup = threadIdx.x / 128;
  if constexpr (C::kMultipliers == 2) {
    if (warpgroup == 0) {
      take_registers<136>();
      multiply<C, 0>(s, p);
    } else if (warpgroup == 1) {
      take_registers<168>();
      multiply<C, 1>(s, p);
    } else {
      give_registers<104>();
      convert<C>(s, p, threadIdx.x - 256);
    }
  } else {
    if (warpgroup == 0) {
      multiply<C, 0>(s, p);
    } else {
      convert<C>(s, p, threadIdx.x - 128);
    }
  }
}

}  // namespace lla::cuda::sm90::decode
