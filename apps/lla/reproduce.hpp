// What the subcommands of `lla reproduce` share.
#pragma once

#include <memory>
#include <string>

#include "common/progress.hpp"
#include "common/results.hpp"

namespace CLI {
class App;
}

namespace lla::app {

void add_reproduce_regression(CLI::App& reproduce, int& exit_code);
void add_reproduce_rates(CLI::App& reproduce, int& exit_code);
void add_reproduce_memory(CLI::App& reproduce, int& exit_code);
void add_reproduce_solver(CLI::App& reproduce, int& exit_code);
void add_reproduce_iterations(CLI::App& reproduce, int& exit_code);
void add_reproduce_capacity(CLI::App& reproduce, int& exit_code);
void add_reproduce_interpolation(CLI::App& reproduce, int& exit_code);
void add_reproduce_lemmas(CLI::App& reproduce, int& exit_code);
void add_reproduce_trained(CLI::App& reproduce, int& exit_code);  // four commands that start a program of their own

// The command line of this process, for the results.
std::string command_line();

// --out and --device, the same for every task.
struct CommonOptions {
  std::string out;
  std::string device = "cpu";
  uint64_t seed = 1;

  experiments::Device device_kind() const;
};
void add_common_options(CLI::App& command, CommonOptions& options, const std::string& default_out, bool with_device);

// A progress bar, and a stop at the first Ctrl-C or TERM (a second one kills as usual).
class Session {
 public:
  explicit Session(const std::string& label);
  ~Session();
  const experiments::Progress& progress() const { return progress_; }

 private:
  struct Bar;
  std::unique_ptr<Bar> bar_;
  experiments::Progress progress_;
};

// What was written and what to do next; the exit code of the command.
int finish(const std::string& out, bool finished);

}  // namespace lla::app
