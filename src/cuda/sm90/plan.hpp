// From the problem to what the kernels are told, without pointers: shared by planner, launcher and tests.
#pragma once

#include "core/problem.hpp"
#include "cuda/sm90/schedule.hpp"

namespace lla::cuda::sm90 {

Shape shape_of(const core::Problem& problem);

// Bytes of cached weights of one resident block.
int64_t cached_weights_per_block(const core::Problem& problem);

}  // namespace lla::cuda::sm90
