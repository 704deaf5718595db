#include "regression/curves.hpp"

#include <fmt/core.h>

namespace lla::experiments {

void write_curves(const fs::path& directory, const Json& records) {
  std::string text = "position";
  std::vector<std::vector<double>> curves;
  for (const Json& r : records) {
    text += fmt::format(
        ",{} d={} segment={} {} ridge={} scale={:.6g} noise={} kernel={} qk_norm={} query_noise={} sequences={}",
        r["model"].get<std::string>(), r["d"].get<int>(), r["segment"].get<int>(),
        r["strict"].get<bool>() ? "strict" : "inclusive", r["ridge"].get<double>(), r["scale"].get<double>(),
        r["noise"].get<double>(), r["kernel"].get<std::string>(), r["qk_norm"].get<bool>(), r["query_noise"].dump(),
        r["sequences"].get<int64_t>());
    curves.push_back(r["mse"]);
  }
  text += "\n";
  for (size_t i = 0; !curves.empty() && i < curves.front().size(); ++i) {
    text += std::to_string(i + 1);
    for (const auto& curve : curves) text += fmt::format(",{}", curve[i]);
    text += "\n";
  }
  write_atomically(directory / "curves.csv", text);
}

}  // namespace lla::experiments
