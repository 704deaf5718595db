// `lla reproduce lemmas`: bias and variance behind Propositions 1 and 2, by the library's own call.
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>

#include "commands.hpp"
#include "numbers.hpp"
#include "rates/lemmas.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

struct Options {
  CommonOptions common;
  bool quick = false;
  experiments::LemmasRun run;
};

void print(const experiments::Json& file) {
  fmt::print("Exponents: squared bias in h, variance in 1/(n h^d)\n\n  d  {:<15} {:<15} {:>7}  {:<18} {:>7} {:>7}\n",
             "quantity", "estimator", "fitted", "95 % (jointly)", "plain", "theory");
  for (const auto& s : file["summary"]["slopes"]) {
    fmt::print("  {}  {:<15} {:<15} {:>7.3f}  [{:.3f}, {:.3f}]   {:>7.3f} {:>7.3f}\n", s["d"].get<int>(),
               s["quantity"].get<std::string>(), s["estimator"].get<std::string>(), s["slope"].get<double>(),
               s["low"].get<double>(), s["high"].get<double>(), s["plain_slope"].get<double>(),
               s["theory"].get<double>());
  }
}

int run(Options o) {
  if (o.quick) o.run.sizes = {5000, 20000}, o.run.repetitions = 3;
  return run_and_print("lemmas", o.common, o.run, print);
}

}  // namespace

void add_reproduce_lemmas(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "lemmas",
      "Bias against the bandwidth and variance against 1/(n h^d) of local constant and local linear attention");
  add_common_options(*command, o->common, "out/lemmas", false);
  command->add_flag("--quick", o->quick, "Fewer observations and repetitions");
  command->add_option("--d", o->run.dims, "Dimension, 1 to 4; repeatable")
      ->capture_default_str()
      ->check(whole_number(1, 4));
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
