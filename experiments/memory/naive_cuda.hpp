// The naive form on a GPU: weights (queries, keys) and differences k_j - q_i (queries, keys, d) in the inputs' type,
// one fp32 matrix (d, d) per query, each for every sequence of the batch.
#pragma once

#include <cstdint>

#include "common/device.hpp"
#include "memory/naive.hpp"

namespace lla::experiments {

struct NaiveProblem : NaiveSizes {
  bool bf16;  // else f32
  float scale, ridge;
  const void *q, *k, *v;
  void* o;
};

// Bytes of the working set, one block after the other.
struct NaiveBlocks {
  double weights, differences, matrices;
  double total() const { return weights + differences + matrices; }
};
NaiveBlocks naive_blocks(const NaiveSizes&, int64_t element_bytes);

// The largest d it takes.
inline constexpr int64_t kNaiveMaxDim = 128;

void naive_lla_cuda(DeviceMemory&, const NaiveProblem&, void* weights, void* differences, float* matrices);

}  // namespace lla::experiments
