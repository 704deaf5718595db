#include "models/config.hpp"

#include <array>
#include <stdexcept>
#include <utility>

#include "models/model.hpp"

namespace lla::trained {
namespace {

constexpr std::array<std::pair<Mixer, std::string_view>, 9> names{{{Mixer::lla, "lla"},
                                                                   {Mixer::softmax, "softmax"},
                                                                   {Mixer::mamba2, "mamba2"},
                                                                   {Mixer::gla, "gla"},
                                                                   {Mixer::hyena, "hyena"},
                                                                   {Mixer::gated_deltanet, "gated_deltanet"},
                                                                   {Mixer::mesanet, "mesanet"},
                                                                   {Mixer::linear, "linear"},
                                                                   {Mixer::parallax, "parallax"}}};

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

bool is_attention(Mixer mixer) { return mixer == Mixer::lla || mixer == Mixer::softmax || mixer == Mixer::parallax; }
// Published with a short convolution and, after it, SiLU.
bool is_published_with_convolution(Mixer mixer) {
  return mixer == Mixer::mamba2 || mixer == Mixer::gated_deltanet || mixer == Mixer::mesanet || mixer == Mixer::hyena;
}

ModelConfig token_config(Mixer mixer, int64_t vocabulary, int64_t length) {
  ModelConfig config;
  config.mixer = mixer;
  config.vocabulary = vocabulary;
  config.max_length = length;
  config.positions = Positions::learned;
  return config;
}

}  // namespace

std::string_view name(Mixer mixer) {
  for (const auto& [value, text] : names) {
    if (value == mixer) return text;
  }
  refuse("a mixer without a name");
}

Mixer mixer_from_name(std::string_view wanted) {
  std::string list;
  for (const auto& [value, text] : names) {
    if (text == wanted) return value;
    list += (list.empty() ? "" : ", ") + std::string(text);
  }
  refuse("there is no model called \"" + std::string(wanted) + "\"; there are " + list);
}

const std::vector<Mixer>& all_mixers() {
  static const std::vector<Mixer> all = [] {
    std::vector<Mixer> list;
    for (const auto& [value, text] : names) list.push_back(value);
    return list;
  }();
  return all;
}

const std::vector<Mixer>& paper_mixers() {
  static const std::vector<Mixer> six{Mixer::lla, Mixer::softmax, Mixer::mamba2,
                                      Mixer::gla, Mixer::hyena,   Mixer::gated_deltanet};
  return six;
}

ModelConfig in_context_config(Mixer mixer, int64_t length, int64_t x_width, int64_t y_width) {
  ModelConfig config;
  config.mixer = mixer;
  config.input_width = x_width + y_width;
  config.output_width = y_width;
  config.max_length = length;
  config.init_std = 0;
  return config;
}

ModelConfig recall_config(Mixer mixer, int64_t vocabulary, int64_t length) {
  return token_config(mixer, vocabulary, length);
}

ModelConfig tracking_config(Mixer mixer, int64_t vocabulary, int64_t length) {
  // Rows of 16 bytes for the tensor cores: a few words more, which never occur.
  ModelConfig config = token_config(mixer, (vocabulary + 63) / 64 * 64, length);
  config.short_convolution = config.feature_map = is_published_with_convolution(mixer);
  return config;
}

ModelConfig language_config(Mixer mixer, int64_t length) {
  ModelConfig config;
  config.mixer = mixer;
  config.vocabulary = 256;
  config.tied_head = false;
  config.max_length = length;
  config.layers = 6;
  config.width = 384;
  config.heads = 6;
  if (is_attention(mixer)) {
    config.positions = Positions::rope;
    config.qk_norm = true;
  } else {
    config.short_convolution = config.feature_map = is_published_with_convolution(mixer);
  }
  if (mixer == Mixer::gated_deltanet) {
    config.output_gate = true;
    config.key_ratio = 0.75;
    config.value_ratio = 1.5;
  }
  const auto count = [](ModelConfig candidate, int64_t mlp_width) {
    candidate.mlp_width = mlp_width;
    return Model(candidate).parameters().count();
  };
  constexpr int64_t softmax_mlp_width = 1024;  // 8/3 of the width
  config.mlp_width = softmax_mlp_width;
  if (mixer == Mixer::softmax) return config;
  ModelConfig softmax = language_config(Mixer::softmax, length);
  const int64_t goal = count(softmax, softmax_mlp_width);
  constexpr int64_t step = 8;  // keeps rows of 16 bytes for the tensor cores
  while (config.mlp_width > step && count(config, config.mlp_width) > goal) config.mlp_width -= step;
  while (count(config, config.mlp_width + step) <= goal) config.mlp_width += step;
  // The nearer of the widths on both sides.
  if (count(config, config.mlp_width + step) - goal < goal - count(config, config.mlp_width)) config.mlp_width += step;
  return config;
}

void check(const ModelConfig& config) {
  const std::string model(name(config.mixer));
  if (config.layers < 1 || config.width < 1 || config.heads < 1) refuse("layers, width and heads must be at least 1");
  if (config.width % config.heads != 0) {
    refuse("the width " + std::to_string(config.width) + " is not a multiple of the " + std::to_string(config.heads) +
           " heads");
  }
  if ((config.vocabulary > 0) == (config.input_width > 0)) refuse("give a vocabulary or an input width, one of them");
  if (config.vocabulary == 0 && config.output_width < 1) refuse("a model over vectors needs an output width");
  if (config.positions == Positions::rope && !is_attention(config.mixer)) {
    refuse(model + " has no rotary positions: only the attention models lla, softmax and parallax do");
  }
  if (config.positions == Positions::rope && config.width / config.heads % 2 != 0) {
    refuse("rotary positions need an even head width");
  }
  if (config.positions == Positions::learned && config.max_length < 1) refuse("learned positions need a max_length");
  if (config.mixer == Mixer::hyena && config.max_length < 1) refuse("hyena's filters need a max_length");
  if (is_attention(config.mixer) && (config.short_convolution || config.feature_map || config.output_gate)) {
    refuse(model + " has no short convolution, feature map or output gate");
  }
  if (config.qk_norm && !is_attention(config.mixer)) refuse(model + " has no QK-norm: it is an option of attention");
  if (config.output_gate && (config.mixer == Mixer::hyena || config.mixer == Mixer::mamba2)) {
    refuse(model + " has a gate of its own; output_gate is for the others");
  }
  if ((config.key_ratio != 1 || config.value_ratio != 1) &&
      (is_attention(config.mixer) || config.mixer == Mixer::hyena || config.mixer == Mixer::mamba2)) {
    refuse(model + " does not take key_ratio or value_ratio");
  }
  if (!(config.ridge_min >= 0 && config.ridge_min < 1)) refuse("ridge_min must be in [0, 1)");
}

}  // namespace lla::trained
