// How the workspace is divided. Host code, tested without a GPU.
#pragma once

#include "core/problem.hpp"
#include "plan/machine.hpp"

namespace lla::cuda::portable {

// Byte offsets of the sections, each 256-byte aligned; -1 where a problem has no use for one.
struct Layout {
  int64_t shift, max, omega, mean_k, mean_v, x, residual, kind;
  int64_t y, mean_e, tau, tau_low, mean_b, c, exponent, dridge;
  int64_t matrices;
  int64_t bytes;

  // direct_blocks: blocks of the direct solver, 0 when it does not run.
  Layout(const core::Problem& problem, int direct_blocks);
};

// Blocks the direct solver runs with on a device; 0 for problems that never need it.
int direct_blocks(const core::Problem& problem, const core::CudaDevice& device);

// Rows that see at most this many keys go to the direct solver; -1: none does.
int64_t direct_keys(const core::Problem& problem);

// Whether rows that conjugate gradients leave unfinished go to the direct solver.
bool rescues(const core::Problem& problem);

}  // namespace lla::cuda::portable
