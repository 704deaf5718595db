// `lla info`: what this build is and what it found on this machine.
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "lla/lla.h"

namespace lla::app {
namespace {

void print_json() {
  nlohmann::ordered_json implementations = nlohmann::ordered_json::array();
  for (int32_t i = 0; const char* name = lla_implementation_name(i); ++i) {
    implementations.push_back({{"name", name}, {"description", lla_implementation_description(i)}});
  }
  const nlohmann::ordered_json info = {{"version", lla_version()},
                                       {"threads", lla_get_num_threads()},
                                       {"machine", lla_machine_description()},
                                       {"implementations", implementations}};
  fmt::print("{}\n", info.dump(2));
}

void print_text() {
  fmt::print("lla {}\n{}\nImplementations, in order of preference:\n", lla_version(), lla_machine_description());
  for (int32_t i = 0; const char* name = lla_implementation_name(i); ++i) {
    fmt::print("  {:<14} {}\n", name, lla_implementation_description(i));
  }
}

}  // namespace

void add_info(CLI::App& root, int& /*exit_code*/) {
  CLI::App* command = root.add_subcommand("info", "Version, what was found on this machine, implementations");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON instead of text");
  command->callback([json] { *json ? print_json() : print_text(); });
}

}  // namespace lla::app
