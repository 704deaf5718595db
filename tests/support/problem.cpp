#include "support/problem.hpp"

#include <cmath>
#include <numeric>
#include <sstream>

#include "core/text.hpp"

namespace lla::test {
namespace {

std::vector<int64_t> without_batch(const Spec& spec, std::vector<int64_t> size) {
  if (spec.packed()) size.erase(size.begin());
  return size;
}

std::string list(const std::vector<int32_t>& values) {
  std::ostringstream text;
  for (size_t i = 0; i < values.size(); ++i) text << (i ? "," : "") << values[i];
  return text.str();
}

}  // namespace

std::vector<int64_t> Spec::rows_size(int64_t channels) const {
  return without_batch(*this, {batch, length_q, heads_q, channels});
}

std::vector<int64_t> Spec::keys_size(int64_t channels) const {
  return without_batch(*this, {batch, length_k, heads_kv, channels});
}

std::vector<int64_t> Spec::ridge_size() const {
  switch (ridge) {
    case RidgeShape::head: return {heads_q};
    case RidgeShape::token: return without_batch(*this, {batch, length_q, heads_q});
    case RidgeShape::dimension: return rows_size(dim);
    default: return {};
  }
}

std::vector<int64_t> Spec::info_size() const { return without_batch(*this, {batch, heads_q, length_q}); }

std::string Spec::text() const {
  static const char* const ridges[] = {"x given", "scalar", "head", "token", "dimension"};
  static const char* const solvers[] = {"auto", "cg", "direct"};
  static const char* const weights[] = {"auto", "recompute", "cached"};
  std::string text =
      core::cat(core::name(dtype), " -> ", core::name(output()), ", B ", batch, " Lq ", length_q, " Lk ", length_k,
                " Hq ", heads_q, " Hkv ", heads_kv, " D ", dim, " Dv ", value_dim, ", ridge ",
                ridges[static_cast<int>(ridge)], x_dtype == DType::none ? "" : core::cat(" as ", core::name(x_dtype)),
                ", ", options.causal ? "causal" : "full", " window (", options.window_left, ", ", options.window_right,
                "), scale ", options.scale, ", tol ", options.tolerance, ", max_iterations ", options.max_iterations,
                ", solver ", solvers[options.solver], ", weights ", weights[options.weights], ", ", name(layout));
  if (packed()) text += core::cat(", cu_q ", list(cu_q), " cu_k ", list(cu_k));
  return text;
}

Spec self_attention(int64_t length, int64_t dim, int64_t heads, int64_t batch) {
  Spec spec;
  spec.batch = batch;
  spec.length_q = spec.length_k = length;
  spec.heads_q = spec.heads_kv = heads;
  spec.dim = spec.value_dim = dim;
  return spec;
}

Inputs make_inputs(const Spec& spec, data::Kind kind, double ridge, uint64_t seed) {
  const data::Sizes sizes{spec.batch,    spec.length_q, spec.length_k, spec.heads_q,
                          spec.heads_kv, spec.dim,      spec.value_dim};
  data::Tensors made = data::make(kind, seed, sizes);
  Inputs inputs;
  inputs.q = rounded(std::move(made.q), spec.dtype);
  inputs.k = rounded(std::move(made.k), spec.dtype);
  inputs.v = rounded(std::move(made.v), spec.dtype);
  const auto count = [](const std::vector<int64_t>& size) {
    return static_cast<size_t>(std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>()));
  };
  if (spec.ridge == RidgeShape::none) {
    inputs.x.resize(count(spec.rows_size(spec.dim)));
    for (size_t i = 0; i < inputs.x.size(); ++i)
      inputs.x[i] = rounded(0.3 * data::normal(seed, ~uint64_t{1}, i), spec.given_dtype());
  } else {
    inputs.ridge.resize(count(spec.ridge_size()));
    for (size_t i = 0; i < inputs.ridge.size(); ++i) {
      inputs.ridge[i] = rounded(ridge * (1 + 0.5 * data::uniform(seed, ~uint64_t{2}, i)), DType::f32);
    }
    if (spec.ridge == RidgeShape::scalar) inputs.ridge[0] = rounded(ridge, DType::f32);
  }
  inputs.grad_o.resize(count(spec.rows_size(spec.value_dim)));
  for (size_t i = 0; i < inputs.grad_o.size(); ++i)
    inputs.grad_o[i] = rounded(data::normal(seed, ~uint64_t{3}, i), spec.dtype);
  return inputs;
}

}  // namespace lla::test
