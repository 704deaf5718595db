// From the problem to what the kernels are told, without pointers: shared by planner, launcher and tests.
#pragma once

#include "core/problem.hpp"
#include "cuda/tensor/schedule.hpp"
#include "cuda/tensor/workspace.hpp"
#include "plan/implementation.hpp"

namespace lla::cuda::sm90 {

Shape shape_of(const core::Problem& problem);
// The same for kernels with a solve.
Shape solve_shape_of(const core::Problem& problem);

// When rows stop and which products are formed from two parts: decided here, printed with the plan.
struct SolveLimits {
  double tolerance;             // of the residual
  double few_keys_tolerance;    // where rows see few keys
  int32_t few_keys_iterations;  // and at least so many there
  int32_t two_part_passes;      // backward: passes over the keys with U in two parts, there
  double share, least;          // core::StopRule
  double sum_error;             // forward: that Σ U / ω may have without the mean value
};
SolveLimits solve_limits(const core::Problem& problem);

// With x given: whether the kernel for blocks that see few keys runs.
bool sees_few_keys(const core::Problem& problem);

// Backward: (batch, key head) pairs whose blocks are launched side by side.
int32_t heads_together(const core::Problem& problem);

// Bytes of cached weights of one resident block.
int64_t cached_weights_per_block(const core::Problem& problem);
// Where the bound of a cache's lengths is too large to keep all weights, those of sequences that turn out to have at
// most so many keys are kept, and the others recompute theirs, each in a kernel of its own. 0: all kept, or none.
int64_t keys_of_kept_weights(const core::Problem& problem, const core::Plan& plan);

// With x given the kernel keeps nothing between tiles: no scratch.
WorkspaceLayout forward_layout(const core::Problem& problem, const core::Plan& plan);

}  // namespace lla::cuda::sm90
