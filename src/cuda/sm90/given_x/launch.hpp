// One launcher per kernel; each is instantiated in a file of its own, so that they compile side by side.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/sm90/given_x/config.hpp"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::sm90 {

template <class Config>
Status launch_given_x(const CUtensorMap& keys, const CUtensorMap& values, const ForwardParams& params, int blocks,
                      cudaStream_t stream);

}  // namespace lla::cuda::sm90
