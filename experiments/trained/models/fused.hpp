// RMS norm, alone or with the residual sum before it: the kernels of kernels/fused.hpp for bf16 on a GPU where they
// were built, torch's operations elsewhere.
#pragma once

#include "torch.hpp"

namespace lla::trained {

// scale * x / sqrt(mean(x^2) + epsilon) over the last dimension.
at::Tensor fused_rms_norm(const at::Tensor& x, double scale, double epsilon);

struct SumAndNorm {
  at::Tensor sum, normed;
};
// sum = x + added, and its norm.
SumAndNorm fused_sum_and_norm(const at::Tensor& x, const at::Tensor& added, double epsilon);

// lambda = floor + (1 - floor) sigmoid(logits) in fp32 (fp64 of fp64): logits (N, rows, D), rows anywhere, to (N, rows,
// heads, D), the same for all heads.
at::Tensor shared_ridge(const at::Tensor& logits, int64_t heads, double floor);

// In place: logits (N, V) fp16 on a GPU become softmax less one at the label, returned as bf16; loss (N) fp32. False
// where there is no kernel for it.
bool has_label_slopes(const at::Tensor& features, int64_t vocabulary);
at::Tensor label_slopes(const at::Tensor& logits, const at::Tensor& labels, at::Tensor& loss);

}  // namespace lla::trained
