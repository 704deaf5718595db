// Cross entropy over a vocabulary together with its head's product.
#pragma once

#include "torch.hpp"

namespace lla::trained {

// The mean over N of -log softmax(features . matrix)[label], for each run: features (R, N, width), matrix (R, width,
// V), labels (R, N) int64; gives (R), fp32 (fp64 where the features are).
at::Tensor label_losses(const at::Tensor& features, const at::Tensor& matrix, const at::Tensor& labels);

}  // namespace lla::trained
