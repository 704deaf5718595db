#include "cuda/portable/layout.hpp"

#include <limits>

#include "cuda/portable/config.hpp"

namespace lla::cuda::portable {

Layout::Layout(const core::Problem& p, int direct_blocks) {
  const int64_t element = p.dtype == DType::f64 ? 8 : 4;
  const bool backward = p.operation == core::Operation::backward;
  const bool solves = !p.given_x();
  int64_t at = 0;
  const auto take = [&](bool wanted, int64_t section_bytes) -> int64_t {
    if (!wanted) return -1;
    const int64_t here = at;
    at += (section_bytes + 255) / 256 * 256;
    return here;
  };
  const int64_t rows = p.rows(), scalars = rows * element;
  shift = take(true, p.batch * p.heads_kv * p.dim * element);
  max = take(true, scalars);
  omega = take(true, scalars);
  mean_k = take(true, scalars * p.dim);
  mean_v = take(true, scalars * p.value_dim);
  x = take(!backward, scalars * p.dim);  // the backward reads the forward's
  residual = take(solves, scalars * p.dim);
  kind = take(true, rows * 4);
  y = take(backward && solves, scalars * p.dim);
  mean_e = take(backward, scalars);
  tau = take(backward, scalars);
  tau_low = take(backward, scalars);
  mean_b = take(backward, scalars);
  c = take(backward, scalars);
  exponent = take(backward, rows * 4);
  dridge = take(backward && (p.ridge == core::RidgeShape::head || p.ridge == core::RidgeShape::scalar), rows * 8);
  matrices = take(direct_blocks > 0 && !DirectConfig::matrix_in_shared(p.dim),
                  direct_blocks * DirectConfig::matrix_elements(p.dim) * 8);
  bytes = at;
}

// The cost model. Per row with n keys and T iterations conjugate gradients take about 3 T n D multiply-adds; forming A
// takes n D^2 / 2 in double and factoring it D^3 / 6. T is some ten for rows with many keys, and up to n for rows with
// at most D, where besides the float iteration loses its accuracy first.
int64_t direct_keys(const core::Problem& p) {
  if (p.given_x() || p.solver == Solver::cg) return -1;
  return p.solver == Solver::direct ? std::numeric_limits<int64_t>::max() : p.dim;
}

// A row that went through max_iterations has already cost more than its direct solution, while the matrix stays on
// chip.
bool rescues(const core::Problem& p) {
  return !p.given_x() && p.solver == Solver::automatic && DirectConfig::matrix_in_shared(p.dim);
}

int direct_blocks(const core::Problem& p, const core::CudaDevice& device) {
  if (direct_keys(p) < 0) return 0;
  const int64_t fitting = device.shared_memory_per_block / static_cast<int64_t>(DirectConfig::shared_bytes(p.dim));
  return device.multiprocessors * static_cast<int>(fitting < 1 ? 1 : fitting > 4 ? 4 : fitting);
}

}  // namespace lla::cuda::portable
