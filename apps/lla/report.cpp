// `lla report DIR`: checks the results, then has Python draw the figures and write the page.
#include <CLI/CLI.hpp>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "commands.hpp"
#include "common/results.hpp"
#include "numbers.hpp"

namespace lla::app {
namespace {

using experiments::Failure;
namespace fs = std::filesystem;

// Runs a program with its output on ours (or nowhere); its exit code, or -1 when it could not be started. It runs in
// the root folder: Python and matplotlib take modules and settings from the current one, which is anybody's.
int run_program(const std::vector<std::string>& words, bool quiet) {
  std::vector<char*> argv;
  for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addchdir_np(&actions, "/");
  if (quiet) {
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  }
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  if (error != 0 || waitpid(pid, &status, 0) < 0 || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

// The folder of the Python package: beside an installed program, or in the source tree this was built from.
fs::path package_folder() {
  std::error_code error;
  const fs::path installed = fs::read_symlink("/proc/self/exe", error).parent_path() / "../share/lla/python";
  if (fs::exists(installed / "lla_report")) return installed;
  if (fs::exists(fs::path(LLA_SOURCE_DIR) / "python/lla_report")) return fs::path(LLA_SOURCE_DIR) / "python";
  throw Failure("the figures' Python package lla_report was not found beside this program or in its source tree");
}

// The interpreter named by LLA_PYTHON, or else the first of ours and the system's that has matplotlib. Always isolated
// (-I): neither the environment nor the current folder adds modules.
std::string find_python() {
  const auto works = [](const std::string& python) {
    return run_program({python, "-I", "-c", "import matplotlib"}, true) == 0;
  };
  if (const char* chosen = std::getenv("LLA_PYTHON"); chosen != nullptr && *chosen != '\0') {
    // A name is looked up in PATH; a path is relative to where we are, not to where it is run.
    const std::string python = std::strchr(chosen, '/') != nullptr ? fs::absolute(chosen).string() : chosen;
    if (works(python)) return python;
    throw Failure(fmt::format("LLA_PYTHON is \"{}\", which is no Python with matplotlib", chosen));
  }
  for (const std::string& python : {(fs::path(LLA_SOURCE_DIR) / ".venv/bin/python").string(), std::string("python3")}) {
    if (works(python)) return python;
  }
  throw Failure(
      "no Python with matplotlib was found; run `make run` once (it sets up .venv), or set LLA_PYTHON to one");
}

// Every results.json in the directory or right below it must be readable before anything is drawn.
void check_results(const fs::path& directory) {
  if (!fs::is_directory(directory)) throw Failure(fmt::format("{} is not a directory", directory.string()));
  int found = 0;
  const auto check = [&](const fs::path& path) {
    if (!fs::exists(path)) return;
    experiments::read_results(path);
    ++found;
  };
  check(directory / experiments::kResultsName);
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.is_directory()) check(entry.path() / experiments::kResultsName);
  }
  if (found == 0) {
    throw Failure(fmt::format("no results in {} (a {} there or one folder below); `lla reproduce` makes them",
                              directory.string(), experiments::kResultsName));
  }
}

int run(const std::string& directory) {
  check_results(directory);
  const fs::path package = package_folder();
  const std::string python = find_python();
  const std::string start =
      "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('lla_report', run_name='__main__')";
  std::fflush(stdout);
  if (run_program({python, "-I", "-c", start, fs::absolute(package).string(), fs::absolute(directory).string()},
                  false) != 0) {
    return kFailed;
  }
  fmt::print("{}\n", fs::canonical(fs::path(directory) / "index.html").string());
  return kSuccess;
}

}  // namespace

void add_report(CLI::App& root, int& exit_code) {
  auto directory = std::make_shared<std::string>();
  CLI::App* command = root.add_subcommand("report", "Figures and a page from the results of `lla reproduce`");
  command->add_option("DIR", *directory, "A directory with results.json, or with folders that have one")
      ->required()
      ->check(not_empty());
  command->callback([directory, &exit_code] { exit_code = run(*directory); });
}

}  // namespace lla::app
