// `lla reproduce`: the paper's results from one command each. The work is in experiments/; here are the options.
#include "reproduce.hpp"

#include <CLI/CLI.hpp>

#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "commands.hpp"
#include "numbers.hpp"
#include "progress.hpp"

namespace lla::app {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int signal) {
  stop_requested = 1;
  std::signal(signal, SIG_DFL);
}

}  // namespace

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  if (!words.empty()) words[0] = "lla";  // by its name: where it was built does not matter to a reader
  std::string text = experiments::shell_words(words);
  // It goes into the results, which are UTF-8; better said now than when they are written.
  try {
    experiments::Json(text).dump();
  } catch (const experiments::Json::exception&) {
    throw CLI::ValidationError("reproduce", "the command line is not valid UTF-8, and the results record it");
  }
  return text;
}

experiments::Device CommonOptions::device_kind() const {
  return device == "cuda" ? experiments::Device::cuda : experiments::Device::cpu;
}

void add_common_options(CLI::App& command, CommonOptions& options, const std::string& default_out, bool with_device) {
  options.out = default_out;
  command.add_option("--out", options.out, "Directory of the results; a run that was stopped continues there")
      ->check(not_empty())
      ->capture_default_str();
  command.add_option("--seed", options.seed, "Of every random draw")
      ->check(whole_number(0, INT64_MAX))
      ->capture_default_str();
  if (with_device) {
    command.add_option("--device", options.device, "Where the attention runs")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
  }
}

Session::Session(const std::string& label) : bar_(std::make_unique<ProgressBar>(label)) {
  progress_.report = [this](double fraction, const std::string&) { bar_->reach(fraction); };
  progress_.stop = [] { return stop_requested != 0; };
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
}

Session::~Session() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

int finish(const std::string& out, bool finished) {
  if (!finished) {
    fmt::print(stderr, "Stopped. What is done is in {}; the same command continues from there.\n", out);
    return kFailed;
  }
  fmt::print("\nResults: {}/{}\nThe page with the figures: lla report {}\n", out, experiments::kResultsName,
             experiments::shell_words({&out, 1}));
  return kSuccess;
}

void add_reproduce(CLI::App& root, int& exit_code) {
  CLI::App* reproduce = root.add_subcommand("reproduce", "Reproduce the paper's results");
  reproduce->require_subcommand(1);
  add_reproduce_regression(*reproduce, exit_code);
  add_reproduce_interpolation(*reproduce, exit_code);
  add_reproduce_capacity(*reproduce, exit_code);
  add_reproduce_rates(*reproduce, exit_code);
  add_reproduce_lemmas(*reproduce, exit_code);
  add_reproduce_memory(*reproduce, exit_code);
  add_reproduce_solver(*reproduce, exit_code);
  add_reproduce_iterations(*reproduce, exit_code);
  add_reproduce_trained(*reproduce, exit_code);
}

}  // namespace lla::app
