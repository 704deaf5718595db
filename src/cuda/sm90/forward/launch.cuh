#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/forward/kernel.cuh"
#include "cuda/sm90/forward/launch.hpp"

namespace lla::cuda::sm90 {

template <class Config>
Status launch_forward(const CUtensorMap& keys, const CUtensorMap& values, const ForwardParams& params, int blocks,
                      cudaStream_t stream) {
  constexpr size_t kShared = sizeof(ForwardShared<Config>);
  static_assert(kShared <= 227 * 1024);
  return launch_early(forward_kernel<Config>, dim3(static_cast<unsigned>(blocks)), Config::kThreads, kShared, stream,
                      "the Hopper forward kernel", keys, values, params);
}

}  // namespace lla::cuda::sm90
