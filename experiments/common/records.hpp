// What a results file must hold before anyone computes with it: the fields each task's records have, by type.
#pragma once

#include "common/results.hpp"

namespace lla::experiments {

// Throws a Failure that names the file, the record and the field. Tasks without a list here: their records are objects.
void check_results_file(const fs::path& path, const Json& file);

}  // namespace lla::experiments
