#include "regression/timing.hpp"

#include "lla/lla.h"

namespace lla::experiments {

void write_timing(const fs::path& directory, const RunSummary& summary) {
  Json settings = Json::array();
  for (const auto& [setting, seconds] : summary.setting_seconds) {
    settings.push_back(
        {{"d", setting.d}, {"segment", setting.segment}, {"sequences", setting.sequences}, {"seconds", seconds}});
  }
  const Json file = {{"threads", lla_get_num_threads()},
                     {"seconds", summary.seconds},
                     {"data_seconds", summary.data_seconds},
                     {"model_seconds", summary.model_seconds},
                     {"waited_seconds", summary.waited_seconds},
                     {"kernel_share", summary.model_seconds / summary.seconds},
                     {"settings", settings}};
  write_atomically(directory / "timing.json", file.dump(1) + "\n");
}

}  // namespace lla::experiments
