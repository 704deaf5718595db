#pragma once

#include "cuda/common/runtime.hpp"
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/launch.hpp"

namespace lla::cuda::sm90 {

template <class Config>
Status launch_forward(const CUtensorMap& keys, const CUtensorMap& values, const ForwardParams& params, int blocks,
                      cudaStream_t stream) {
  constexpr size_t kShared = sizeof(ForwardShared<Config>);
  static_assert(kShared <= 227 * 1024);
  LLA_RETURN_IF_ERROR(
      allow_shared_memory(forward_kernel<Config>, kShared, "the Hopper forward kernel's shared memory"));
  forward_kernel<Config><<<blocks, Config::kThreads, kShared, stream>>>(keys, values, params);
  return launched("the Hopper forward kernel");
}

}  // namespace lla::cuda::sm90
