// The models' layers one position after the other, in fp64, written from the published equations and sharing no code
// with the models: no chunks, no stacking, no fused projections beyond the layout of the parameters.
#pragma once

#include <functional>
#include <string>

#include "models/config.hpp"
#include "torch.hpp"

namespace lla::trained {

// The parameter of one run by its name without prefix.
using Lookup = std::function<at::Tensor(const std::string&)>;

// x (L, width), normed, with the gain of the norm multiplied in. Gives (L, width).
at::Tensor step_by_step(const ModelConfig& config, const Lookup& weights, const at::Tensor& x);

}  // namespace lla::trained
