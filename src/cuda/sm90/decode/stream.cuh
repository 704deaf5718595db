// The streaming kernel: one pass over the cache, a partial sum per unit.
#pragma once

#include "cuda/sm90/decode/fetch.cuh"
#include "cuda/sm90/decode/multiply.cuh"
#include "cuda/sm90/decode/unit.cuh"

namespace lla::cuda::sm90::decode {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) stream_kernel(const __grid_constant__ Params p) {
  auto& s = *reinterpret_cast<Shared<C>*>(dynamic_tiles);
  static_assert(sizeof(Shared<C>) <= 227 * 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      s.loaded[i].init(C::kFetchers * kFillArrivals<C>);
      s.full[i].init(kWarpArrivals);
      s.empty[i].init(4 * C::kMultipliers * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      s.taken[i].init(kWarpArrivals);
      s.ready[i].init(kWarpArrivals);
      s.left[i].init(C::kWarps * kWarpArrivals);
      s.done[i].init(kWarpArrivals);
    }
    s.overflow = 0;
    barrier_init_fence();
  }
  for (int i = threadIdx.x; i < C::kStages * C::kStageKeys; i += C::kThreads) {
    reinterpret_cast<uint4&>(Roots<C>(s, i / C::kStageKeys).at(i % C::kStageKeys)) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();
  __syncthreads();
  wait_for_last_kernel();
  let_next_kernel_begin();
  const int warpgroup = threadIdx.x / 128;
  if (C::kMultipliers == 2 && warpgroup == 0) {
    take_registers<168>();
    multiply_stages<C, 0>(s, p);
  } else if (C::kMultipliers == 1 && warpgroup == 0) {
    multiply_stages<C, 0>(s, p);
  } else if (C::kMultipliers == 2 && warpgroup == 1) {
    take_registers<136>();
    if constexpr (C::kMultipliers == 2) multiply_stages<C, 1>(s, p);
  } else {
    if constexpr (C::kMultipliers == 2) give_registers<104>();
    const int thread = threadIdx.x - 128 * C::kMultipliers;
    if (thread < C::kConverters) {
      convert_units<C>(s, p, thread);
    } else if (thread < C::kConverters + 32) {
      look_after_units<C>(s, p);
    } else {
      Fetcher<C>(s, p, thread - C::kConverters - 32).run();
    }
  }
}

}  // namespace lla::cuda::sm90::decode
