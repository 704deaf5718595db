#pragma once

#include "cuda/common/runtime.hpp"
#include "cuda/sm90/parallax/kernel.cuh"
#include "cuda/sm90/parallax/launch.hpp"

namespace lla::cuda::sm90 {

template <class Config>
Status launch_parallax(const CUtensorMap& keys, const CUtensorMap& values, const ForwardParams& params, int blocks,
                       cudaStream_t stream) {
  constexpr size_t kShared = sizeof(ParallaxShared<Config>);
  static_assert(kShared <= 227 * 1024);
  LLA_RETURN_IF_ERROR(allow_shared_memory(parallax_kernel<Config>, kShared, "the Hopper kernel's shared memory"));
  parallax_kernel<Config><<<blocks, Config::kThreads, kShared, stream>>>(keys, values, params);
  return launched("the Hopper kernel for a given x");
}

}  // namespace lla::cuda::sm90
