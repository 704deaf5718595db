// How far one setting has come: sums of squared errors over the sequences done so far. Doubles survive the file bit for
// bit, so continuing gives exactly the numbers an uninterrupted run would have given.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "common/results.hpp"
#include "regression/settings.hpp"

namespace lla::experiments {

struct Sums {
  int64_t sequences = 0;
  // [strict][series][position]
  std::array<std::vector<std::vector<double>>, 2> error;

  explicit Sums(int length, size_t series = kPlainSeries) {
    for (auto& form : error) form.assign(series, std::vector<double>(length, 0.0));
  }
};

Json to_json(const RegressionSetting&);
// `series`: those that are being computed, all of the setting's or what a sweep adds to earlier results.
fs::path checkpoint_path(const fs::path& directory, const RegressionSetting&, const std::vector<Series>& series);
void write_checkpoint(const fs::path&, const RegressionSetting&, const Sums&);
// Zero sums where there is no checkpoint; throws when the file there is damaged or of another setting.
Sums read_checkpoint(const fs::path&, const RegressionSetting&, size_t series = kPlainSeries);

// The finished records of a setting, one for each series and form.
std::vector<Json> to_records(const RegressionSetting&, const std::vector<Series>&, const Sums&);
// What a finished series is recognised by in the results.
Json identity(const RegressionSetting&, const Series&);

}  // namespace lla::experiments
