#include "regression/checkpoint.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/core.h>

namespace lla::experiments {

Json to_json(const RegressionSetting& s) {
  return {{"length", s.length},
          {"d", s.d},
          {"segment", s.segment},
          {"sequences", s.sequences},
          {"ridges", s.ridges},
          {"mesa_ridges", s.mesa_ridges},
          {"scale", s.scale},
          {"noise", s.noise},
          {"kernel", kKernelNames[int(s.kernel)]},
          {"qk_norm", s.qk_norm},
          {"query_noise", s.query_noise ? Json(*s.query_noise) : Json()},
          {"seed", s.seed}};
}

fs::path checkpoint_path(const fs::path& directory, const RegressionSetting& s, const std::vector<Series>& series) {
  std::string name = fmt::format("d{}-s{}-n{}-scale{}-noise{}-{}", s.d, s.segment, s.sequences, s.scale, s.noise,
                                 kKernelNames[int(s.kernel)]);
  if (s.qk_norm) name += "-norm";
  if (s.query_noise) name += fmt::format("-query{}", *s.query_noise);
  for (const Series& one : series) name += fmt::format("-{}{}", kModelNames[int(one.model)], one.ridge);
  return directory / "partial" / (name + ".json");
}

void write_checkpoint(const fs::path& path, const RegressionSetting& setting, const Sums& sums) {
  const Json file = {{"schema_version", kSchemaVersion},
                     {"setting", to_json(setting)},
                     {"sequences_done", sums.sequences},
                     {"sums", sums.error}};
  write_atomically(path, file.dump() + "\n");
}

Sums read_checkpoint(const fs::path& path, const RegressionSetting& setting, size_t series) {
  Sums sums(setting.length, series);
  if (!fs::exists(path)) return sums;
  const Json file = read_json(path);
  if (!file.is_object()) throw Failure(fmt::format("{} is not a checkpoint of this program", path.string()));
  const auto damaged = [&](const char* why) -> Failure {
    return Failure(fmt::format("the checkpoint {} {}; delete it to start this setting again", path.string(), why));
  };
  const auto field = [&](const char* name) { return file.contains(name) ? file[name] : Json(); };
  if (field("schema_version") != kSchemaVersion) throw damaged("has another schema version");
  if (field("setting") != to_json(setting)) throw damaged("belongs to another setting");
  const Json done = field("sequences_done");
  if (!done.is_number_integer() || done < 0 || done > setting.sequences) {
    throw damaged(fmt::format("has done {} of {} sequences", done.dump(-1, ' ', true), setting.sequences).c_str());
  }
  try {
    file.at("sequences_done").get_to(sums.sequences);
    file.at("sums").get_to(sums.error);
  } catch (const Json::exception&) {
    throw damaged("is damaged");
  }
  for (const auto& form : sums.error) {
    if (form.size() != series) throw damaged("is damaged");
    for (const auto& model : form) {
      const bool sums_of_squares =
          std::all_of(model.begin(), model.end(), [](double e) { return e >= 0 && std::isfinite(e); });
      if (static_cast<int>(model.size()) != setting.length || !sums_of_squares) throw damaged("is damaged");
    }
  }
  return sums;
}

Json identity(const RegressionSetting& s, const Series& series) {
  return {{"d", s.d},
          {"segment", s.segment},
          {"model", kModelNames[int(series.model)]},
          {"ridge", series.ridge},
          {"scale", s.scale},
          {"noise", s.noise},
          {"kernel", kKernelNames[int(s.kernel)]},
          {"qk_norm", s.qk_norm},
          {"query_noise", s.query_noise ? Json(*s.query_noise) : Json()},
          {"sequences", s.sequences}};
}

std::vector<Json> to_records(const RegressionSetting& s, const std::vector<Series>& list, const Sums& sums) {
  std::vector<Json> records;
  for (int strict = 0; strict < 2; ++strict) {
    for (size_t i = 0; i < list.size(); ++i) {
      std::vector<double> mse = sums.error[strict][i];
      for (double& e : mse) e /= static_cast<double>(sums.sequences);
      const double mean = std::accumulate(mse.begin(), mse.end(), 0.0) / static_cast<double>(mse.size());
      if (!std::isfinite(mean)) {  // which no file could hold
        throw Failure(fmt::format("the errors of {} are not finite at d {}, segment {}, ridge {}, scale {}, noise {}",
                                  kModelNames[int(list[i].model)], s.d, s.segment, list[i].ridge, s.scale, s.noise));
      }
      Json record = {{"task", "regression"}, {"strict", strict == 1}};
      record.update(identity(s, list[i]));
      record["mse"] = mse;
      record["mse_mean"] = mean;
      records.push_back(std::move(record));
    }
  }
  return records;
}

}  // namespace lla::experiments
