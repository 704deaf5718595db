#include "train/model_options.hpp"

#include <stdexcept>

#include "tasks/settings.hpp"

namespace lla::trained {
namespace {

ModelConfig base(const std::string& task, Mixer mixer, const Layout& layout) {
  if (task == "in-context") {
    return in_context_config(mixer, layout.length, layout.features - layout.targets, layout.targets);
  }
  if (task == "recall") return recall_config(mixer, layout.vocabulary, layout.length);
  if (task == "state-tracking") return tracking_config(mixer, layout.vocabulary, layout.length);
  return language_config(mixer, layout.length);
}

template <class T>
T choose(Settings& s, const std::string& name, T value, const std::vector<std::string>& names,
         const std::vector<T>& values) {
  std::string fallback;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == value) fallback = names[i];
  }
  const std::string chosen = s.choice(name, fallback, names);
  for (size_t i = 0; i < values.size(); ++i) {
    if (names[i] == chosen) value = values[i];
  }
  return value;
}

}  // namespace

ModelConfig model_config(const std::string& task, const std::string& model, const Layout& layout, const Json& options) {
  try {
    ModelConfig c = base(task, mixer_from_name(model), layout);
    Settings s(options, "the model");
    constexpr int64_t kMost = 1 << 20;
    c.layers = s.whole("layers", c.layers, 1, 1024);
    c.width = s.whole("width", c.width, 1, kMost);
    c.heads = s.whole("heads", c.heads, 1, kMost);
    c.tied_head = s.boolean("tied_head", c.tied_head);
    c.norm = choose(s, "norm", c.norm, {"none", "rms", "layer"}, {Norm::none, Norm::rms, Norm::layer});
    c.positions = choose(s, "positions", c.positions, {"none", "learned", "rope"},
                         {Positions::none, Positions::learned, Positions::rope});
    c.rope_theta = s.number("rope_theta", c.rope_theta, 1, 1e12);
    c.qk_norm = s.boolean("qk_norm", c.qk_norm);
    c.mlp_width = s.whole("mlp_width", c.mlp_width, 0, kMost);
    c.init_std = s.number("init_std", c.init_std, 0, 100);
    c.ridge = choose(s, "ridge", c.ridge, {"per-dimension", "per-head", "infinite"},
                     {Ridge::per_dimension, Ridge::per_head, Ridge::infinite});
    c.ridge_form =
        choose(s, "ridge_form", c.ridge_form, {"sigmoid", "softplus"}, {RidgeForm::sigmoid, RidgeForm::softplus});
    c.ridge_min = s.number("ridge_min", c.ridge_min, 0, 1e9);
    c.ridge_bias = s.boolean("ridge_bias", c.ridge_bias);
    c.short_convolution = s.boolean("short_convolution", c.short_convolution);
    c.feature_map = s.boolean("feature_map", c.feature_map);
    c.output_gate = s.boolean("output_gate", c.output_gate);
    c.key_ratio = s.number("key_ratio", c.key_ratio, 0, 64);
    c.value_ratio = s.number("value_ratio", c.value_ratio, 0, 64);
    c.state_width = s.whole("state_width", c.state_width, 1, kMost);
    c.hyena_filter_width = s.whole("hyena_filter_width", c.hyena_filter_width, 1, kMost);
    c.mesa_iterations = s.whole("mesa_iterations", c.mesa_iterations, 1, kMost);
    c.chunk = s.whole("chunk", c.chunk, 0, kMost);
    s.finish();
    check(c);
    return c;
  } catch (const std::invalid_argument& error) {
    throw Failure(error.what());
  }
}

}  // namespace lla::trained
