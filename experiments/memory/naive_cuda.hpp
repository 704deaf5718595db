// The naive form on a GPU: weights (n, n) and differences k_j - q_i (n, n, d) in the inputs' type, one fp32 matrix (d,
// d) per query, each for every sequence of the batch. What blockwise computation is measured against there.
#pragma once

#include <cstdint>

#include "common/device.hpp"

namespace lla::experiments {

struct NaiveProblem {
  int64_t batch, n, d;
  bool bf16;  // else f32
  float scale, ridge;
  const void *q, *k, *v;  // (batch, n, d), causal
  void* o;
};

// Bytes of the working set, one block after the other.
struct NaiveBlocks {
  double weights, differences, matrices;
  double total() const { return weights + differences + matrices; }
};
NaiveBlocks naive_blocks(int64_t batch, int64_t n, int64_t d, int64_t element_bytes);

// The largest d it takes.
inline constexpr int64_t kNaiveMaxDim = 128;

void naive_lla_cuda(DeviceMemory&, const NaiveProblem&, void* weights, void* differences, float* matrices);

}  // namespace lla::experiments
