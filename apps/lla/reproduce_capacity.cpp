// `lla reproduce capacity`: the paper's retrieval error (associative recall at q = k_j).
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>

#include "capacity/run.hpp"
#include "commands.hpp"
#include "numbers.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

struct Options {
  CommonOptions common;
  bool quick = false;
  experiments::CapacityRun run;
};

void print(const experiments::Json& file) {
  fmt::print(
      "Squared error at a stored key, relative to |v|^2\n\n{:>4} {:>10} {:>6} {:>10} {:>10} {:>12} {:>10} {:>10} "
      "{:>10}\n",
      "d", "keys", "pairs", "linear", "its bias", "interference", "softmax", "MesaNet", "LLA");
  for (const auto& r : file["records"]) {
    fmt::print("{:>4} {:>10} {:>6}", r["d"].get<int>(), r["normalised"].get<bool>() ? "normalised" : "Gaussian",
               r["pairs"].get<int>());
    for (const char* name : {"linear", "linear_bias", "linear_interference", "softmax", "mesanet", "lla"})
      fmt::print(" {:>{}.3g}", r[name].get<double>(), std::string(name) == "linear_interference" ? 12 : 10);
    fmt::print("\n");
  }
}

int run(Options o) {
  for (int n = 4; n <= (o.quick ? 256 : 2048); n *= 2) o.run.pairs.push_back(n);
  if (o.quick) o.run.repetitions = 4;
  return run_and_print("capacity", o.common, o.run, print);
}

}  // namespace

void add_reproduce_capacity(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "capacity",
      "Retrieval error at a stored key against the number of pairs: linear attention, softmax, MesaNet, LLA");
  add_common_options(*command, o->common, "out/capacity", false);
  command->add_flag("--quick", o->quick, "Up to 256 pairs, fewer repetitions");
  command->add_option("--d", o->run.dims, "Dimension; repeatable")->capture_default_str()->check(whole_number(2, 256));
  command->add_option("--ridge", o->run.ridge, "LLA's ridge")->capture_default_str()->check(number_from(0));
  command->add_option("--mesa-ridge", o->run.mesa_ridge, "MesaNet's ridge")
      ->capture_default_str()
      ->check(number_above(0));
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
