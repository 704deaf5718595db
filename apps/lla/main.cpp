// The `lla` command: parses, hands over to a subcommand, and turns whatever went wrong into one sentence on stderr.
#include <CLI/CLI.hpp>

#include <exception>

#include <fmt/core.h>

#include "commands.hpp"
#include "lla/lla.h"

int main(int argc, char** argv) {
  CLI::App root{"Local Linear Attention: check it, measure it, reproduce its results.", "lla"};
  root.set_version_flag("--version", std::string("lla ") + lla_version());
  root.set_help_all_flag("--help-all", "Print the help of every subcommand and exit");
  root.require_subcommand(0, 1);  // none: the help says more than an error would

  int exit_code = lla::app::kSuccess;
  lla::app::add_info(root, exit_code);
  lla::app::add_check(root, exit_code);
  lla::app::add_bench(root, exit_code);
  lla::app::add_reproduce(root, exit_code);
  lla::app::add_report(root, exit_code);

  try {
    root.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return root.exit(error) == 0 ? lla::app::kSuccess : lla::app::kBadUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "lla: {}\n", error.what());
    return lla::app::kFailed;
  }
  if (root.get_subcommands().empty()) {
    fmt::print(stderr, "{}", root.help());
    return lla::app::kBadUsage;
  }
  return exit_code;
}
