// Trains one stack of runs, epoch by epoch, from its checkpoint or from the beginning. Killed anywhere and started
// again it gives the same curves to the bit.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "experiment.hpp"
#include "models/model.hpp"
#include "train/adamw.hpp"
#include "train/graph.hpp"
#include "train/source.hpp"

namespace lla::trained {

struct Sources {
  std::shared_ptr<const Source> training, validation, test;  // test may be none: then it is not looked at
  bool accuracy = false;                                     // the score is an accuracy, else an error
};

struct TrainerOptions {
  at::Device device{at::kCPU};
  bool captured = true;
  experiments::fs::path folder;     // checkpoints in partial/, logs in logs/
  double checkpoint_seconds = 120;  // between two checkpoints at least
  // What else is asked of a run once it has ended, with its parameters (1, P); goes into RunState::extra.
  std::function<Json(const Model&, const at::Tensor& master, at::ScalarType compute)> at_end;
};

// What a run came to.
struct RunState {
  Run run{};
  std::string ended;  // "": still training; "cap", "accuracy", "not finite"
  int64_t steps = 0;
  double seconds = 0;           // its share of the stack's
  Json epochs = Json::array();  // {"epoch", "loss", "validation_loss", "validation", "test_loss", "test"}
  Json rows = Json::object();   // how LLA's rows were solved: {"forward": {status: count}, "backward": ...}
  Json extra = Json::object();
};

struct Glance {                        // for progress
  int64_t epoch, epochs, step, steps;  // step within the epoch
  size_t active;
  double loss;   // of the best run, so far in this epoch
  double score;  // of the best run, last epoch; negative where there is none
  double steps_per_second, seconds_left;
};

class StackTrainer {
 public:
  StackTrainer(const Stack& stack, const ModelConfig& config, Sources sources, TrainerOptions options);

  // True when every run has ended; false when `stop` said so first, with a checkpoint on disk.
  bool train(const std::function<bool()>& stop, const std::function<void(const Glance&)>& look);

  const std::vector<RunState>& runs() const { return runs_; }
  const Model& model() const { return model_; }
  at::ScalarType compute() const { return compute_; }
  // (active runs, P).
  const at::Tensor& master() const { return adam_->master; }
  double step_seconds() const { return step_seconds_; }
  void forget_checkpoint() const;  // once the records are on disk

 private:
  void step();
  void arrange();  // buffers and graph for the runs that are left
  void begin_epoch();
  void end_epoch();
  void evaluate(const Source& source, int64_t count, std::vector<double>& loss, std::vector<double>& score) const;
  void save() const;
  bool load();
  void log(const RunState& run) const;
  std::vector<uint64_t> seeds() const;
  Glance glance() const;

  Stack stack_;
  Model model_;
  Sources sources_;
  TrainerOptions options_;
  at::ScalarType compute_;
  int64_t steps_per_epoch_;
  std::vector<RunState> runs_;
  std::vector<size_t> active_;  // which of them are rows of the buffers

  std::unique_ptr<AdamW> adam_;
  at::Tensor gradient_, order_, position_, loss_sum_, counts_;
  std::unique_ptr<Replay> replay_;
  int64_t epoch_ = 0, done_ = 0;  // epochs finished; steps done in the one begun
  double step_seconds_ = 0;       // of the stack, measured last
};

}  // namespace lla::trained
