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
  // [strict][model][position]
  std::array<std::array<std::vector<double>, kModels>, 2> error;

  explicit Sums(int length) {
    for (auto& form : error) form.fill(std::vector<double>(length, 0.0));
  }
};

Json to_json(const RegressionSetting&);
fs::path checkpoint_path(const fs::path& directory, const RegressionSetting&);
void write_checkpoint(const fs::path&, const RegressionSetting&, const Sums&);
// Zero sums where there is no checkpoint; throws when the file there is damaged or of another setting.
Sums read_checkpoint(const fs::path&, const RegressionSetting&);

// The finished records of a setting, five models in two forms.
std::vector<Json> to_records(const RegressionSetting&, const Sums&);
// What a finished setting is recognised by in the results.
Json identity(const RegressionSetting&);

}  // namespace lla::experiments
