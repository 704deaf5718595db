#include <CLI/CLI.hpp>

#include <fmt/core.h>

#include "commands.hpp"

namespace lla::app {

void add_bench(CLI::App& root, int& exit_code) {
  root.add_subcommand("bench", "Not written yet")->callback([&exit_code] {
    fmt::print(stderr, "lla bench: not written yet\n");
    exit_code = kBadUsage;
  });
}

}  // namespace lla::app
