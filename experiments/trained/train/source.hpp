// Data on the device, and batches of it for a stack of runs.
#pragma once

#include <memory>
#include <vector>

#include "models/model.hpp"
#include "tasks/task.hpp"

namespace lla::trained {

struct Labelled {
  Batch batch;
  at::Tensor places;   // (R, B, Q) int64: of the labelled tokens among the batch's last ones; undefined: all of them
  at::Tensor targets;  // (R, B, Q, targets) fp32, or
  at::Tensor labels;   // (R, B, Q) int64
};

// One part of the data for every seed of a stack.
class Source {
 public:
  virtual ~Source() = default;
  virtual int64_t count() const = 0;  // examples a seed
  // rows (R, B) int64, on the device, from order() or rows().
  virtual Labelled take(const at::Tensor& rows) const = 0;
  // (steps, R, B) on the CPU: which examples each step of an epoch takes for runs with these seeds.
  virtual at::Tensor order(const std::vector<uint64_t>& seeds, int64_t epoch, int64_t steps, int64_t batch) const = 0;
  // (R, last - first) on the CPU: these examples of each run's own data.
  virtual at::Tensor rows(const std::vector<uint64_t>& seeds, int64_t first, int64_t last) const = 0;
};

// Examples 0 ... count - 1 of a part, made once for each seed. A run's order is a permutation drawn from its seed and
// the epoch; what does not fill a batch waits for another epoch.
std::unique_ptr<Source> make_examples(std::shared_ptr<const Task> task, const std::vector<uint64_t>& seeds, Part part,
                                      int64_t count, const at::Device& device, at::ScalarType features, int threads);

// Windows of a text: tokens [s, s + length), labels one further. Training takes windows at starts drawn from the seed
// and the step; examples in order are windows one after the other.
std::unique_ptr<Source> make_windows(const std::vector<uint8_t>& text, int64_t length, const at::Device& device);

// (R, B, Q, outputs), at the labelled tokens: the last layer computes the batch's last tokens only, the head the
// labelled.
at::Tensor outputs(const Model& model, const StackedParameters& weights, const Labelled& labelled,
                   SolveCounts* counts = nullptr);
// The loss of each run, (R): mean square or cross entropy over its labelled tokens. From the outputs, or with the head
// and the loss in one, which is what training does.
at::Tensor losses(const at::Tensor& outputs, const Labelled& labelled);
at::Tensor losses(const Model& model, const StackedParameters& weights, const Labelled& labelled, SolveCounts* counts);
// Labelled tokens whose most probable output is the label, (R) int64.
at::Tensor hits(const at::Tensor& outputs, const Labelled& labelled);

}  // namespace lla::trained
