// `lla reproduce solver`: conjugate gradients by position, ridge, data kind, arithmetic and form.
#include <CLI/CLI.hpp>

#include <map>
#include <memory>

#include <fmt/core.h>

#include "commands.hpp"
#include "numbers.hpp"
#include "reproduce.hpp"
#include "solver/run.hpp"

namespace lla::app {
namespace {

struct Options {
  CommonOptions common;
  bool quick = false;
  experiments::SolverRun run;
};

// Worst error over the data kinds and positions, for each ridge, form and arithmetic.
void print_table(const experiments::Json& records, double tolerance) {
  std::map<double, std::map<std::string, double>, std::greater<>> worst;
  for (const auto& r : records) {
    if (r["tolerance"] != tolerance) continue;
    const double error = r["error"].is_null() ? 1e300 : r["error"].get<double>();
    double& cell =
        worst[r["ridge"].get<double>()][r["form"].get<std::string>() + " " + r["arithmetic"].get<std::string>()];
    cell = std::max(cell, error);
  }
  if (worst.empty()) return;
  fmt::print(
      "Worst output error over data kinds and positions at tolerance {:g}, against the fp64 direct solve\n\n{:>8}",
      tolerance, "ridge");
  for (const auto& [name, error] : worst.begin()->second) fmt::print(" {:>13}", name);
  fmt::print("\n");
  for (const auto& [ridge, row] : worst) {
    fmt::print("{:>8}", ridge);
    for (const auto& [name, error] : row)
      fmt::print(" {:>13}", error > 1e10 ? "diverged" : fmt::format("{:.1e}", error));
    fmt::print("\n");
  }
  fmt::print("\n");
}

int run(Options o) {
  o.run.out = o.common.out;
  o.run.seed = o.common.seed;
  o.run.command = command_line();
  if (o.quick) {
    o.run.positions = {16, 64, 256, 1024};
    o.run.rows = 2;
  }
  bool finished;
  {
    const Session session("solver");
    finished = experiments::run(o.run, session.progress());
  }
  if (!finished) return finish(o.common.out, false);
  const auto file = experiments::read_results(o.run.out / experiments::kResultsName);
  for (const double tolerance : o.run.tolerances) print_table(file["records"], tolerance);
  fmt::print(
      "The library promises more than the residual: it stops where output and gradients are within a few tolerances, "
      "and a row\n"
      "that says OK has at most twice the residual it reports (docs/math.md, \"What a residual promises\").\n\n");
  return finish(o.common.out, true);
}

}  // namespace

void add_reproduce_solver(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "solver", "Conjugate gradients: iterations and error by position, ridge, data kind and arithmetic");
  add_common_options(*command, o->common, "out/solver", false);
  command->add_flag("--quick", o->quick, "Fewer positions and rows");
  command->add_option("--d", o->run.dim, "Head dimension")->capture_default_str()->check(whole_number(2, 256));
  command->add_option("--ridge", o->run.ridges, "Ridge; repeatable")->check(number_from(0));
  command->add_option("--tolerance", o->run.tolerances, "Relative residual at which a solve stops; repeatable")
      ->check(number_above(0))
      ->capture_default_str();
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
