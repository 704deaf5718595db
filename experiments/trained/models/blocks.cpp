#include "models/blocks.hpp"

#include <cmath>

#include "models/fused.hpp"

namespace lla::trained {

namespace {
constexpr double norm_epsilon = 1e-5, unit_epsilon = 1e-6;
}

void Mixing::add_matrix(ParameterTable& table, const char* name, int64_t in, int64_t out) const {
  table.add(prefix_ + name, {in, out}, matrix_init(config_, in));
}

void Mixing::add_vector(ParameterTable& table, const char* name, int64_t size, InitRule init, bool full) const {
  table.add(prefix_ + name, {size}, init, /*decay=*/false, full);
}

InitRule matrix_init(const ModelConfig& config, int64_t in) {
  const double fan_in = 1 / std::sqrt(3.0 * static_cast<double>(in));
  return {Init::normal, config.init_std > 0 ? config.init_std : fan_in, 0};
}

at::Tensor with_gain(const at::Tensor& matrix, const at::Tensor& gain) {
  return gain.defined() ? matrix * gain.unsqueeze(-1) : matrix;
}

at::Tensor rms_normed(const at::Tensor& x) { return fused_rms_norm(x, 1, norm_epsilon); }

at::Tensor unit_normed(const at::Tensor& x) {
  const auto width = static_cast<double>(x.size(-1));
  // The norm divides by sqrt(mean + epsilon).
  return fused_rms_norm(x, 1 / std::sqrt(width), unit_epsilon / width);
}

Residual added(Norm norm, const at::Tensor& x, const at::Tensor& more) {
  if (norm == Norm::rms) {
    const SumAndNorm both = fused_sum_and_norm(x, more, norm_epsilon);
    return {both.sum, both.normed};
  }
  const at::Tensor sum = x + more;
  return {sum, normed(norm, sum)};
}

at::Tensor normed(Norm norm, const at::Tensor& x) {
  switch (norm) {
    case Norm::none: return x;
    case Norm::rms: return rms_normed(x);
    case Norm::layer: return at::layer_norm(x, {x.size(-1)}, {}, {}, norm_epsilon);
  }
  return x;
}

at::Tensor short_convolved(const at::Tensor& x, const at::Tensor& kernel, int64_t batch) {
  const int64_t runs = x.size(0), length = x.size(1) / batch, taps = kernel.size(1);
  const at::Tensor padded = at::constant_pad_nd(x.unflatten(1, {batch, length}), {0, 0, taps - 1, 0});
  at::Tensor sum;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const at::Tensor shifted = padded.narrow(2, taps - 1 - tap, length);
    const at::Tensor weight = kernel.select(1, tap).view({runs, 1, 1, -1});
    sum = tap == 0 ? shifted * weight : at::addcmul(sum, shifted, weight);
  }
  return sum.flatten(1, 2);
}

at::Tensor last_rows(const at::Tensor& x, const Pass& pass) {
  if (pass.rows == pass.length) return x;
  return x.unflatten(1, {pass.batch, pass.length}).narrow(2, pass.length - pass.rows, pass.rows).flatten(1, 2);
}

at::Tensor wide(const at::Tensor& x) { return x.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat); }

}  // namespace lla::trained
