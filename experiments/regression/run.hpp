// `lla reproduce regression`: the settings one after the other, sequences in batches, results and checkpoints on disk.
#pragma once

#include <string>
#include <vector>

#include "common/progress.hpp"
#include "common/results.hpp"
#include "regression/settings.hpp"

namespace lla::experiments {

struct RegressionRun {
  std::string task = "regression";  // what the results are called: this, or a study of its settings
  std::vector<RegressionSetting> settings;
  fs::path out;
  std::string command;
  Device device = Device::cpu;
  std::string implementation;     // of the attention; empty for the library's choice
  double checkpoint_seconds = 5;  // at most this much work is lost by an interruption
};

struct RunSummary {
  bool finished = false;  // false when it was stopped; the same command continues
  double seconds = 0;
  double data_seconds = 0;    // making the data
  double model_seconds = 0;   // inside the models; of the attention on a GPU, what was waited for
  double waited_seconds = 0;  // for the GPU
  std::vector<std::pair<RegressionSetting, double>> setting_seconds;
};

// The batch of sequences one library call takes: a GPU needs more to be busy, the more so the smaller they are.
int64_t batch_size(Device, int d);

RunSummary run(const RegressionRun&, const Progress&);

}  // namespace lla::experiments
