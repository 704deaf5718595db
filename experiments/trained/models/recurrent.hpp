// What GLA, linear attention, Gated DeltaNet and MesaNet share: one product for all inputs, a short convolution and
// SiLU where asked, heads, RMS norm of each head's output, an output gate where asked, the output product.
#pragma once

#include "models/blocks.hpp"

namespace lla::trained {

class Recurrent : public Mixing {
 public:
  // more: further columns the recurrence needs (decays, step sizes).
  Recurrent(const ModelConfig& config, std::string prefix, int64_t more)
      : Mixing(config, std::move(prefix)), more_(more) {}
  void declare(ParameterTable& table) const override;
  at::Tensor mix(const Pass& pass, const at::Tensor& x, const at::Tensor& gain) const override;

 protected:
  struct Columns {
    at::Tensor q, k, v;  // (R, B * L, width)
    at::Tensor more;
  };
  // (N, rows, H, width of a head's values).
  virtual at::Tensor recur(const Pass& pass, const Columns& in) const = 0;
  // Whether SiLU is this mixer's feature map.
  virtual bool activates() const { return false; }

  int64_t key_width() const { return static_cast<int64_t>(config_.key_ratio * static_cast<double>(config_.width)); }
  int64_t value_width() const { return static_cast<int64_t>(config_.value_ratio * static_cast<double>(config_.width)); }
  // (R, B * L, H * D) to (R * B, L, H, D).
  at::Tensor heads(const Pass& pass, const at::Tensor& x) const {
    return x.reshape({pass.runs * pass.batch, pass.length, config_.heads, x.size(2) / config_.heads});
  }

 private:
  int64_t more_;
};

}  // namespace lla::trained
