#include "models/model.hpp"

#include "models/blocks.hpp"
#include "models/label_loss.hpp"

namespace lla::trained {
namespace {

std::unique_ptr<Mixing> make_mixing(const ModelConfig& config, std::string prefix) {
  switch (config.mixer) {
    case Mixer::lla:
    case Mixer::softmax:
    case Mixer::parallax: return make_attention(config, std::move(prefix));
    case Mixer::mamba2: return make_mamba2(config, std::move(prefix));
    case Mixer::gla: return make_gla(config, std::move(prefix));
    case Mixer::hyena: return make_hyena(config, std::move(prefix));
    case Mixer::gated_deltanet: return make_gated_deltanet(config, std::move(prefix));
    case Mixer::mesanet: return make_mesanet(config, std::move(prefix));
    case Mixer::linear: return make_linear(config, std::move(prefix));
  }
  return nullptr;
}

std::string layer_prefix(int64_t layer) { return "layer" + std::to_string(layer) + "."; }

// tokens (R, N) into weights (R, V, d): rows of the run's own table. at::embedding's gradient sorts the tokens and sums
// in that order: the same bits every time.
at::Tensor embedded(const at::Tensor& table, const at::Tensor& tokens) {
  const int64_t runs = table.size(0), vocabulary = table.size(1);
  const at::Tensor first = at::arange(runs, tokens.options()).mul_(vocabulary).unsqueeze(1);
  return at::embedding(table.reshape({runs * vocabulary, table.size(2)}), tokens + first);
}

}  // namespace

Model::Model(const ModelConfig& config) : config_(config) {
  check(config);
  const bool gains = config.norm != Norm::none;
  const auto add_gain = [&](const std::string& name) {
    if (gains) table_.add(name, {config.width}, {Init::ones}, /*decay=*/false);
  };
  if (config.vocabulary > 0) {
    const double embedding_std = config.init_std > 0 ? config.init_std : 0.02;
    table_.add("embedding", {config.vocabulary, config.width}, {Init::normal, embedding_std});
  } else {
    table_.add("input", {config.input_width, config.width}, matrix_init(config, config.input_width));
  }
  if (config.positions == Positions::learned) {
    table_.add("positions", {config.max_length, config.width}, {Init::normal, 0.02}, /*decay=*/false);
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string prefix = layer_prefix(layer);
    add_gain(prefix + "gain");
    mixers_.push_back(make_mixing(config, prefix));
    mixers_.back()->declare(table_);
    if (config.mlp_width > 0) {
      add_gain(prefix + "mlp_gain");
      table_.add(prefix + "mlp_in", {config.width, 2 * config.mlp_width}, matrix_init(config, config.width));
      table_.add(prefix + "mlp_out", {config.mlp_width, config.width}, matrix_init(config, config.mlp_width));
    }
  }
  add_gain("gain");
  const int64_t outputs = config.vocabulary > 0 ? config.vocabulary : config.output_width;
  if (config.vocabulary == 0 || !config.tied_head) {
    table_.add("head", {config.width, outputs}, matrix_init(config, config.width));
  }
  table_.finish();
}

Model::~Model() = default;

at::Tensor Model::features(const StackedParameters& weights, const Batch& batch, SolveCounts* counts) const {
  const bool tokens = config_.vocabulary > 0;
  const at::Tensor& given = tokens ? batch.tokens : batch.inputs;
  TORCH_CHECK(given.defined() && given.size(0) == weights.runs(), "the batch must have ", tokens ? "tokens" : "inputs",
              " for each of the ", weights.runs(), " runs");
  Pass pass{weights, given.size(0), given.size(1), given.size(2), given.size(2), counts};
  TORCH_CHECK(config_.max_length == 0 || pass.length <= config_.max_length, "a sequence of ", pass.length,
              " positions; the model was made for ", config_.max_length);
  const auto gain = [&](const std::string& name) { return config_.norm == Norm::none ? at::Tensor() : weights[name]; };

  at::Tensor x = tokens ? embedded(weights["embedding"], given.flatten(1))
                        : at::bmm(given.flatten(1, 2).to(weights.compute()), weights["input"]);
  if (config_.positions == Positions::learned) {
    const at::Tensor positions = weights["positions"].narrow(1, 0, pass.length).unsqueeze(1);
    x = (x.unflatten(1, {pass.batch, pass.length}) + positions).flatten(1, 2);
  }
  Residual stream{x, normed(config_.norm, x)};
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const std::string prefix = layer_prefix(layer);
    if (layer + 1 == config_.layers && batch.last > 0) pass.rows = std::min(batch.last, pass.length);
    const at::Tensor mixed = mixers_[layer]->mix(pass, stream.normed, gain(prefix + "gain"));
    stream = added(config_.norm, last_rows(stream.sum, pass), mixed);
    if (config_.mlp_width > 0) {
      const at::Tensor in = with_gain(weights[prefix + "mlp_in"], gain(prefix + "mlp_gain"));
      const auto parts = at::bmm(stream.normed, in).split(config_.mlp_width, 2);
      stream = added(config_.norm, stream.sum, at::bmm(at::silu(parts[0]) * parts[1], weights[prefix + "mlp_out"]));
    }
  }
  at::Tensor features = stream.normed;
  if (batch.positions.defined()) {
    // By rows of (R * B * L, width): at::embedding for its gradient.
    const at::Tensor first = at::arange(pass.runs * pass.batch, batch.positions.options()).mul_(pass.rows);
    const at::Tensor places = batch.positions.reshape({pass.runs * pass.batch, -1}) + first.unsqueeze(1);
    features = at::embedding(features.flatten(0, 1), places).view({pass.runs, -1, config_.width});
  }
  return features.unflatten(1, {pass.batch, -1});
}

Model::Head Model::head_inputs(const StackedParameters& weights, const at::Tensor& features) const {
  const bool tied = config_.vocabulary > 0 && config_.tied_head;
  // The gain of the last norm goes to the smaller side: the features, or a small head.
  const at::Tensor gain = config_.norm == Norm::none ? at::Tensor() : weights["gain"];
  const at::Tensor x = features.flatten(1, 2);
  if (!tied) return {x, with_gain(weights["head"], gain)};
  return {gain.defined() ? x * gain.unsqueeze(1) : x, weights["embedding"].transpose(1, 2)};
}

at::Tensor Model::head(const StackedParameters& weights, const at::Tensor& features) const {
  const auto [x, matrix] = head_inputs(weights, features);
  return at::bmm(x, matrix).unflatten(1, {features.size(1), -1});
}

at::Tensor Model::losses(const StackedParameters& weights, const at::Tensor& features, const at::Tensor& labels) const {
  const auto [x, matrix] = head_inputs(weights, features);
  return label_losses(x, matrix, labels.flatten(1));
}

at::Tensor Model::forward(const StackedParameters& weights, const Batch& batch, SolveCounts* counts) const {
  return head(weights, features(weights, batch, counts));
}

at::Tensor SolveCounts::count(int64_t runs, const at::Device& device) const {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  at::Tensor sum = at::zeros({2, runs, statuses}, options);
  const at::Tensor values = at::arange(statuses, options.dtype(at::kInt));
  const auto counted = [&](const lla::torch::RowInfo& rows) {
    return (rows.status.reshape({runs, -1, 1}) == values).sum(1);
  };
  for (const Layer& layer : layers) {
    if (layer.forward->status.defined()) sum.select(0, 0).add_(counted(*layer.forward));
    if (layer.backward->status.defined()) sum.select(0, 1).add_(counted(*layer.backward));
  }
  return sum;
}

}  // namespace lla::trained
