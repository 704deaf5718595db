// The config files, built in.
#include "builtin.hpp"
#include "experiment.hpp"

namespace lla::trained {

const std::vector<std::string>& builtin_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const auto& [name, text] : kConfigs) list.emplace_back(name);
    return list;
  }();
  return names;
}

Json builtin_config(const std::string& task) {
  for (const auto& [name, text] : kConfigs) {
    if (name == task) return Json::parse(text);
  }
  throw Failure("there is no experiment \"" + task + "\"");
}

}  // namespace lla::trained
