// An experiment as its config file writes it, and the stacks of runs it asks for. Free of torch.
//
//     {"task": "recall", "models": [...], "settings": [{"length": 64, "pairs": 4, "training": {...}}, ...],
//      "options": {...}, "model": {...}, "training": {...}, "per_model": {"hyena": {"training": {...}, "model":
//      {...}}}, "quick": {...}, "paper": {...}}
//
// A setting is a choice of the task's own options, `options` what all settings share; its "training", "model",
// "per_model" and "models" are patches for this setting alone. "rates_of": {...} takes the best learning rate of
// another setting, the one with these values instead. "quick", "paper" and "plateau" are patches (RFC 7396) over all
// the rest.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/results.hpp"

namespace lla::trained {

using experiments::Failure;
using experiments::Json;

struct Training {
  int64_t epochs = 1;  // at most; the schedule ends there
  int64_t batch = 256;
  int64_t examples = 0;         // in a training set
  int64_t steps_per_epoch = 0;  // 0: as many batches as the examples fill
  int64_t validation = 1000, test = 1000, evaluation_batch = 250;
  std::vector<double> learning_rates;
  std::vector<uint64_t> seeds = {1};
  bool seeds_at_best = true;  // seeds after the first at the best learning rate only; else at all of them
  bool beyond_edge = false;   // where the best learning rate is the smallest or largest: one more, beyond it
  std::string schedule = "cosine";
  int64_t warmup = 0;     // steps
  double final_rate = 0;  // of the learning rate, at the end of a cosine
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.1, clip = 0;
  double leave_at = 0.99;          // validation accuracy at which a run is done; 0: never
  std::string precision = "auto";  // bf16, f32, or by the device: bf16 on a GPU
};

Training read_training(const Json& values);

// Runs that differ in learning rate and seed only, and train as one.
struct Run {
  double learning_rate;
  uint64_t seed;
};
// Where a stack's runs come from. Those that are not given follow from what other runs came to, and wait for them.
enum class RunsFrom {
  config,        // given
  edge,          // one more learning rate, where the best of them is the first or the last
  best,          // the seeds after the first, at the best learning rate
  best_of_other  // all seeds, at the best learning rate of another setting
};
struct Stack {
  std::string task, model;
  Json setting;       // of the task, without "training"
  Json task_options;  // the setting with what all settings share
  Json model_options;
  Training training;
  RunsFrom runs_from = RunsFrom::config;
  Json rates_of;          // unless from the config: the identity of the runs whose best learning rate counts
  std::vector<Run> runs;  // empty where they are not known yet

  std::string name() const;
  Json identity() const;     // of its records: task, model and setting
  size_t most_runs() const;  // as many as it has, or may come to have
};

struct Experiment {
  Json config;                      // with the variant and the subset applied: what the results record
  Json estimates = Json::object();  // of seconds
  std::vector<Stack> stacks;
};

// What of a config is wanted; empty means all.
struct Subset {
  std::string variant;  // "", "quick", "paper" or "plateau"
  std::vector<std::string> models;
  std::vector<double> learning_rates;
  std::vector<uint64_t> seeds;
  std::vector<int64_t> lengths, segments, pairs, items, examples;
  int64_t epochs = 0;
  std::vector<std::string> assignments;  // "training.warmup=0": a value of the config by its path
};

// Config files by experiment, as built into the program.
Json builtin_config(const std::string& task);
const std::vector<std::string>& builtin_names();

Experiment make_experiment(Json config, const Subset& subset);
// Whether a task's score is an accuracy; otherwise it is an error.
bool scored_by_accuracy(const std::string& task);
// The learning rate beyond `best`, as far from it as its neighbour, where it is the smallest or largest of several.
std::optional<double> rate_beyond_edge(std::vector<double> rates, double best);
// Steps of a whole run.
int64_t steps_of(const Training& training);
// Seconds a stack is expected to take, by a config's estimates ({"cuda": {"lla": seconds for a million tokens of one
// run}, "cpu": {...}}); nothing where the model has none. `tokens`: of an example.
std::optional<double> estimated_seconds(const Json& estimates, const Stack& stack, const std::string& device,
                                        int64_t tokens);

}  // namespace lla::trained
