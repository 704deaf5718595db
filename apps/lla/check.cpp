#include <CLI/CLI.hpp>

#include <fmt/core.h>

#include "commands.hpp"

namespace lla::app {

void add_check(CLI::App& root, int& exit_code) {
  root.add_subcommand("check", "Not written yet")->callback([&exit_code] {
    fmt::print(stderr, "lla check: not written yet\n");
    exit_code = kBadUsage;
  });
}

}  // namespace lla::app
