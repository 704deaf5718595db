// From the problem to what the kernels are told, without pointers: shared by planner, launcher and tests.
#pragma once

#include "core/problem.hpp"
#include "cuda/sm90/schedule.hpp"
#include "cuda/sm90/workspace.hpp"
#include "plan/implementation.hpp"

namespace lla::cuda::sm90 {

Shape shape_of(const core::Problem& problem);
// The same for kernels with a solve.
Shape solve_shape_of(const core::Problem& problem);

// Bytes of cached weights of one resident block.
int64_t cached_weights_per_block(const core::Problem& problem);

// With x given the kernel keeps nothing between tiles: no scratch.
WorkspaceLayout forward_layout(const core::Problem& problem, const core::Plan& plan);

}  // namespace lla::cuda::sm90
