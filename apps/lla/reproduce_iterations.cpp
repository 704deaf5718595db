// `lla reproduce iterations`: the output's error after a fixed number of iterations.
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>

#include "commands.hpp"
#include "numbers.hpp"
#include "reproduce.hpp"
#include "solver/iterations.hpp"

namespace lla::app {
namespace {

struct Options {
  CommonOptions common;
  bool quick = false;
  std::string layers;
  experiments::IterationsRun run;
};

void print(const experiments::Json& file) {
  fmt::print("Worst relative error of the output over rows, after T iterations\n\n{:<9} {:>4} {:>6} {:<10}", "kind",
             "d", "ridge", "method");
  for (const auto& t : file["settings"]["steps"]) fmt::print(" {:>8}", fmt::format("T = {}", t.get<int>()));
  fmt::print("\n");
  for (const auto& r : file["records"]) {
    fmt::print("{:<9} {:>4} {:>6} {:<10}", r["kind"].get<std::string>(), r["d"].get<int>(),
               r["ridge"].is_null() ? "own" : fmt::format("{:g}", r["ridge"].get<double>()),
               r["method"].get<std::string>());
    for (const auto& e : r["worst"]) fmt::print(" {:>8.1e}", e.get<double>());
    fmt::print("\n");
  }
}

int run(Options o) {
  o.run.layers = o.layers;
  if (o.quick) o.run.heads = 1, o.run.positions = {16, 64, 256};
  return run_and_print("iterations", o.common, o.run, print);
}

}  // namespace

void add_reproduce_iterations(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "iterations",
      "Error after a fixed number of iterations: conjugate gradients, with diagonal preconditioner, Chebyshev");
  add_common_options(*command, o->common, "out/iterations", false);
  command->add_flag("--quick", o->quick, "Fewer rows");
  command->add_option("--d", o->run.dims, "Head dimension; repeatable")
      ->capture_default_str()
      ->check(whole_number(2, 256));
  command->add_option("--ridge", o->run.ridges, "Ridge; repeatable")->capture_default_str()->check(number_above(0));
  command->add_option("--layers", o->layers,
                      "Folder with NAME_q.npy, NAME_k.npy, NAME_v.npy (n, d) and NAME_ridge.npy (n) of trained layers");
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
