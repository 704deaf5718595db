// A stacked model: R runs of one architecture as a pure function of their parameters and a batch.
//
//     Model model(recall_config(Mixer::lla, 8192, 256));
//     at::Tensor master = at::stack({model.init(1), model.init(2)});              // (R, P) fp32
//     StackedParameters weights(model.parameters(), master, at::kBFloat16, true);
//     at::Tensor logits = model.forward(weights, {.tokens = tokens, .positions = labelled});
//     weights.gradients(loss(logits), gradient);                                  // (R, P) fp32
//
// Only deterministic operations without host synchronisation: forward and gradients can be captured in a CUDA graph.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "models/config.hpp"
#include "models/parameters.hpp"
#include "torch.hpp"

namespace lla::trained {

struct Batch {
  at::Tensor tokens;  // (R, B, L) int64, or
  at::Tensor inputs;  // (R, B, L, input_width), any floating dtype
  // Where outputs are wanted: the last `last` positions, or `positions` (R, B, Q) int64, or everywhere.
  int64_t last = 0;
  at::Tensor positions;
};

// How LLA's rows were solved, by status (lla_row_status), run and pass. Give one to forward, take the gradients, then
// ask.
class SolveCounts {
 public:
  static constexpr int64_t statuses = 6;
  // (2, R, statuses) int64 on the device: forward, backward. Zero for models without a solve.
  at::Tensor count(int64_t runs, const at::Device& device) const;

  // One entry a layer, filled by the pass itself.
  struct Layer {
    c10::intrusive_ptr<lla::torch::RowInfo> forward, backward;
  };
  std::vector<Layer> layers;
};

class Mixing;  // the sequence mixer of one layer, blocks.hpp

class Model {
 public:
  explicit Model(const ModelConfig& config);
  ~Model();

  const ModelConfig& config() const { return config_; }
  const ParameterTable& parameters() const { return table_; }
  at::Tensor init(uint64_t seed) const { return table_.init(seed); }

  // (R, B, Q, output_width or vocabulary), in the compute dtype.
  at::Tensor forward(const StackedParameters& weights, const Batch& batch, SolveCounts* counts = nullptr) const;
  // As forward up to the head: (R, B, Q, width), normed. head() does the rest.
  at::Tensor features(const StackedParameters& weights, const Batch& batch, SolveCounts* counts = nullptr) const;
  at::Tensor head(const StackedParameters& weights, const at::Tensor& features) const;
  // Cross entropy with labels (R, B, Q) int64, the mean of each run, (R): head and loss in one, at half the memory
  // traffic.
  at::Tensor losses(const StackedParameters& weights, const at::Tensor& features, const at::Tensor& labels) const;

 private:
  struct Head {
    at::Tensor features, matrix;  // (R, N, width), (R, width, outputs)
  };
  Head head_inputs(const StackedParameters& weights, const at::Tensor& features) const;

  ModelConfig config_;
  ParameterTable table_;
  std::vector<std::unique_ptr<Mixing>> mixers_;
};

}  // namespace lla::trained
