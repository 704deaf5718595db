// The `lla` command: parses, hands over to a subcommand, and turns whatever went wrong into one sentence on stderr.
#include <CLI/CLI.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>

#include <fmt/core.h>

#include "commands.hpp"
#include "cpu/cpu.hpp"
#include "lla/lla.h"

namespace {

// A closed standard stream would give its number to the next file that is opened, results for one, and what is printed
// would go there. Filled with something that cannot be written to, it fails as a closed one should.
void fill_closed_streams() {
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) == -1 && errno == EBADF) ::open("/dev/null", O_RDONLY);
  }
}

// fmt would throw where stderr is closed or full, too; then there is nobody left to tell.
void complain(const std::string& sentence) { std::fprintf(stderr, "lla: %s\n", sentence.c_str()); }

// What was printed has arrived: a full disk or a closed pipe is an error, also of `lla info`.
int finish(int exit_code) {
  errno = 0;
  const bool written = std::cout.flush() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (written || exit_code != lla::app::kSuccess) return exit_code;
  complain(fmt::format("the output could not be written{}{}", errno ? ": " : "", errno ? std::strerror(errno) : ""));
  return lla::app::kFailed;
}

int run(int argc, char** argv) {
  CLI::App root{"Local Linear Attention: check it, measure it, reproduce its results.", "lla"};
  root.set_version_flag("--version", std::string("lla ") + lla_version());
  root.set_help_all_flag("--help-all", "Print the help of every subcommand and exit");
  root.require_subcommand(0, 1);  // none: the help says more than an error would

  root.parse_complete_callback([] {  // before any subcommand; help and version need no threads
    if (const lla::Status status = lla::cpu::check_environment(); !status) throw CLI::ValidationError(status.message());
  });

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
    complain(error.what());
    return lla::app::kFailed;
  }
  if (root.get_subcommands().empty()) {
    std::fputs(root.help().c_str(), stderr);
    return lla::app::kBadUsage;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  fill_closed_streams();
  return finish(run(argc, argv));
}
