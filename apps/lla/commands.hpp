// The subcommands of `lla`. Each add_NAME declares its options on `root` and, when it is chosen, runs and sets
// `exit_code`.
#pragma once

namespace CLI {
class App;
}

namespace lla::app {

// What the process returns.
inline constexpr int kSuccess = 0;
inline constexpr int kFailed = 1;  // the command ran and its answer is "no": a check above its gate, a file not written
inline constexpr int kBadUsage = 2;  // the command line asks for something that does not exist

void add_info(CLI::App& root, int& exit_code);
void add_check(CLI::App& root, int& exit_code);
void add_bench(CLI::App& root, int& exit_code);
void add_reproduce(CLI::App& root, int& exit_code);
void add_report(CLI::App& root, int& exit_code);

}  // namespace lla::app
