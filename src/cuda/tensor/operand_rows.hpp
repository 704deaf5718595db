// From the caller's operands to what the kernels are told of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/text.hpp"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::tensor {

inline Rows rows_of(const core::Operand& o) {
  if (!o) return {};
  Rows r{o.data, o.stride[0], o.stride[1], o.stride[2], o.stride[3], o.dtype, false};
  const int64_t vector = 16 / std::max<int64_t>(core::size_of(o.dtype), 1);
  const bool strides = o.stride[0] % vector == 0 && o.stride[1] % vector == 0 && o.stride[2] % vector == 0;
  r.vectors = o.stride[3] == 1 && strides && reinterpret_cast<uintptr_t>(o.data) % 16 == 0;
  return r;
}

inline Ridge ridge_of(const core::Operand& o, core::RidgeShape shape) {
  return {static_cast<const float*>(o.data),   o.stride[0], o.stride[1], o.stride[2], o.stride[3],
          shape == core::RidgeShape::dimension};
}

// A zero scale means equal weights; the smallest one keeps masked logits (-inf times it) at -inf.
inline float scale_log2(double scale) {
  return std::max(static_cast<float>(std::abs(scale) * std::numbers::log2e), 1e-37f);
}

}  // namespace lla::cuda::tensor
