// timing.json: how long the settings took and how much of it was inside the models. Kept out of results.json, which is
// the same bit for bit however often a run was interrupted.
#pragma once

#include "regression/run.hpp"

namespace lla::experiments {

void write_timing(const fs::path& directory, const RunSummary&);

}  // namespace lla::experiments
