// What the models are built of: the interface of a sequence mixer, and operations over stacked runs.
#pragma once

#include <memory>
#include <string>

#include "models/config.hpp"
#include "models/model.hpp"

namespace lla::trained {

// One forward pass through one layer.
struct Pass {
  const StackedParameters& weights;
  int64_t runs, batch, length;
  int64_t rows;  // outputs are wanted at the last `rows` positions
  SolveCounts* counts = nullptr;
};

// The sequence mixer of one layer. Its parameters are called PREFIX + name.
class Mixing {
 public:
  Mixing(const ModelConfig& config, std::string prefix) : config_(config), prefix_(std::move(prefix)) {}
  virtual ~Mixing() = default;

  virtual void declare(ParameterTable& table) const = 0;
  // x (R, B * L, width), normed but for `gain` (R, width; may be undefined), which the first product takes in. Gives
  // (R, B * rows, width).
  virtual at::Tensor mix(const Pass& pass, const at::Tensor& x, const at::Tensor& gain) const = 0;

 protected:
  int64_t head_width() const { return config_.width / config_.heads; }
  const at::Tensor& get(const Pass& pass, const char* name) const { return pass.weights[prefix_ + name]; }
  void add_matrix(ParameterTable& table, const char* name, int64_t in, int64_t out) const;
  void add_vector(ParameterTable& table, const char* name, int64_t size, InitRule init, bool full) const;

  ModelConfig config_;
  std::string prefix_;
};

std::unique_ptr<Mixing> make_attention(const ModelConfig& config, std::string prefix);  // LLA, softmax, Parallax
std::unique_ptr<Mixing> make_mamba2(const ModelConfig& config, std::string prefix);
std::unique_ptr<Mixing> make_gla(const ModelConfig& config, std::string prefix);
std::unique_ptr<Mixing> make_hyena(const ModelConfig& config, std::string prefix);
std::unique_ptr<Mixing> make_gated_deltanet(const ModelConfig& config, std::string prefix);
std::unique_ptr<Mixing> make_mesanet(const ModelConfig& config, std::string prefix);
std::unique_ptr<Mixing> make_linear(const ModelConfig& config, std::string prefix);

// Of a matrix (in, out): normal, of config.init_std or, where that is 0, 1/sqrt(3 in).
InitRule matrix_init(const ModelConfig& config, int64_t in);

// Rows of `matrix` (R, in, out) times gain (R, in): the gain of a norm, moved into the product that follows it, where
// it costs nothing.
at::Tensor with_gain(const at::Tensor& matrix, const at::Tensor& gain);

// Over the last dimension, without gain.
at::Tensor rms_normed(const at::Tensor& x);
// x / |x| over the last dimension.
at::Tensor unit_normed(const at::Tensor& x);
at::Tensor normed(Norm norm, const at::Tensor& x);

// The residual stream after something was added to it, and its norm.
struct Residual {
  at::Tensor sum, normed;
};
Residual added(Norm norm, const at::Tensor& x, const at::Tensor& more);

// Depthwise causal convolution: x (R, B * L, c), kernel (R, taps, c), kernel[j] weighs the value j positions back.
at::Tensor short_convolved(const at::Tensor& x, const at::Tensor& kernel, int64_t batch);

// The last `rows` positions: x (R, B * L, c) to (R, B * rows, c).
at::Tensor last_rows(const at::Tensor& x, const Pass& pass);

// As fp32, or fp64 where the model computes in it.
at::Tensor wide(const at::Tensor& x);

}  // namespace lla::trained
