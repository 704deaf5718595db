// From a task's layout and a config's options to a model.
#pragma once

#include "experiment.hpp"
#include "models/config.hpp"
#include "tasks/task.hpp"

namespace lla::trained {

// The set-up of docs/experiments/models.md for this task, with what the config changes of it.
ModelConfig model_config(const std::string& task, const std::string& model, const Layout& layout, const Json& options);

}  // namespace lla::trained
