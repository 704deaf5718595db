// `lla reproduce in-context`, `recall`, `state-tracking`, `language-model`: they train models with libtorch, in a
// program of their own, so that this one needs no torch.
#include <CLI/CLI.hpp>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <vector>

#include <unistd.h>

#include "commands.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

namespace fs = std::filesystem;

// Where it is named, beside this program, or nowhere.
fs::path trainer() {
  if (const char* named = std::getenv("LLA_TRAIN")) return named;
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path() / "lla_train";
}

// Hands this process over to the trainer: progress, Ctrl-C and the exit code are its own.
int start(const std::string& task, const std::vector<std::string>& rest) {
  const std::string program = trainer().string();
  if (::access(program.c_str(), X_OK) != 0) {
    throw experiments::Failure(
        "the trained experiments are a program of their own, which is not at " + program +
        ": build it with -DLLA_BUILD_TORCH=ON and the target lla_train (docs/experiments.md), or "
        "name it in LLA_TRAIN");
  }
  std::vector<std::string> words = {program, task};
  words.insert(words.end(), rest.begin(), rest.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(program.c_str(), arguments.data());
  throw experiments::Failure(program + " could not be started: " + std::strerror(errno));
}

void add(CLI::App& reproduce, const std::string& task, const std::string& about, int& exit_code) {
  CLI::App* command = reproduce.add_subcommand(task, about);
  command->prefix_command();  // the options are the trainer's
  command->set_help_flag();   // and so is --help
  command->callback([command, task, &exit_code] { exit_code = start(task, command->remaining()); });
}

}  // namespace

void add_reproduce_trained(CLI::App& reproduce, int& exit_code) {
  add(reproduce, "in-context", "Trained models: in-context regression on piecewise linear data", exit_code);
  add(reproduce, "recall", "Trained models: multi-query associative recall", exit_code);
  add(reproduce, "state-tracking", "Trained models: permutation state tracking", exit_code);
  add(reproduce, "language-model", "Trained models: a byte-level language model on Python source", exit_code);
}

}  // namespace lla::app
