// Works through an experiment's stacks: what is done is in results.json, what is begun in a checkpoint, the rest
// follows.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "experiment.hpp"
#include "torch.hpp"

namespace lla::trained {

struct QueueOptions {
  std::vector<at::Device> devices = {at::Device(at::kCPU)};  // one stack at a time on each
  experiments::fs::path out;
  double seconds = 0;  // stop after as many; 0: when all is done
  int threads = 1;     // that make data
  bool captured = true;
  double checkpoint_seconds = 120;
  std::string command;
};

// True when all is done; false when the time was up or `interrupted` said so.
bool run_queue(const Experiment& experiment, const QueueOptions& options, const std::function<bool()>& interrupted);

// The best learning rate by validation among finished records of a stack, if it has any that did not fail.
const Json* best_record(const Json& records, const Json& identity, bool accuracy);

}  // namespace lla::trained
