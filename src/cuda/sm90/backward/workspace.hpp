// What the backward pass keeps in the caller's workspace, and where. Plain C++: planned and tested without a GPU.
#pragma once

#include <algorithm>

#include "cuda/sm90/plan.hpp"
#include "cuda/tensor/backward/records.hpp"
#include "cuda/tensor/workspace.hpp"

namespace lla::cuda::sm90 {

// Bytes from the start of the workspace. What only the solve needs (scratch and cached weights, from forward.scratch
// on) lies where the operands go afterwards.
struct BackwardLayout {
  WorkspaceLayout forward;
  int64_t bounds, bounds_bytes;  // zeroed
  int64_t head_exponents;
  int64_t rows, units;  // constants, with one tile of rows to spare
  int64_t sizes;
  int64_t y, starts;
  int64_t low;  // a flag per block of rows
  int64_t ridge_sums;
  int64_t operand[kQueryOperands];
  int64_t size;

  // `workers` and the weights' bytes are those of the solve; 0 where x is given.
  BackwardLayout(const core::Problem& p, const Shape& shape, int workers, int64_t weights_bytes_per_worker)
      : forward(p, workers, weights_bytes_per_worker) {
    const int64_t dim = padded_dim(p.dim, p.value_dim);
    const int64_t heads = (p.packed ? 1 : p.batch) * p.heads_kv;
    const int64_t spare = 64;  // the copy engine reads whole tiles of constants
    int64_t at = forward.scratch;
    const auto take = [&](int64_t bytes) {
      return std::exchange(at, at + (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment);
    };
    bounds_bytes = heads * static_cast<int64_t>(sizeof(HeadBounds));
    bounds = take(bounds_bytes);
    head_exponents = take(heads * 2 * 4);
    rows = take((p.rows() + spare) * static_cast<int64_t>(sizeof(RowConstants)));
    units = take(p.rows() * static_cast<int64_t>(sizeof(RowUnits)));
    sizes = take(p.rows() * static_cast<int64_t>(sizeof(RowSizes)));
    y = take(p.given_x() ? 0 : p.rows() * dim * 4);
    starts = take(p.given_x() ? 0 : p.rows() * static_cast<int64_t>(sizeof(RowStart)));
    low = take(operand_blocks(shape) * 4);
    ridge_sums = take(operand_blocks(shape) * 8);
    const int64_t shared = at;
    for (int i = 0; i < kQueryOperands; ++i)
      operand[i] = i >= kOpYHigh && p.given_x() ? shared : take(p.rows() * dim * 2);
    size = at;
    move_solve(shared);
  }

 private:
  void move_solve(int64_t to) {
    const int64_t by = to - forward.scratch;
    forward.scratch += by;
    forward.weights += by;
    size = std::max(size, forward.size + by);
  }
};

// Of a call whose plan has these.
inline BackwardLayout backward_layout(const core::Problem& p, int workers, bool cached) {
  const bool solves = !p.given_x();
  return {p, shape_of(p), solves ? workers : 0, solves && cached ? cached_weights_per_block(p) : 0};
}

}  // namespace lla::cuda::sm90
