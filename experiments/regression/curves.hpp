// curves.csv: the position-wise errors, a line per position and a column per record.
#pragma once

#include "common/results.hpp"

namespace lla::experiments {

void write_curves(const fs::path& directory, const Json& records);

}  // namespace lla::experiments
