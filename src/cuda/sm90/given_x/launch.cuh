#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/given_x/kernel.cuh"
#include "cuda/sm90/given_x/launch.hpp"

namespace lla::cuda::sm90 {

template <class Config>
Status launch_given_x(const CUtensorMap& keys, const CUtensorMap& values, const ForwardParams& params, int blocks,
                      cudaStream_t stream) {
  constexpr size_t kShared = sizeof(GivenXShared<Config>);
  static_assert(kShared <= 227 * 1024);
  return launch_early(given_x_kernel<Config>, dim3(static_cast<unsigned>(blocks)), Config::kThreads, kShared, stream,
                      "the Hopper kernel for a given x", keys, values, params);
}

}  // namespace lla::cuda::sm90
