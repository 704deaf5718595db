// `lla reproduce rates`: the convergence rates of the paper's Propositions 1 and 2.
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>

#include "commands.hpp"
#include "numbers.hpp"
#include "rates/run.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

struct Options {
  CommonOptions common;
  bool quick = false;
  experiments::RatesRun run;
};

void print(const experiments::Json& file) {
  fmt::print("Exponent of n in the integrated squared error\n\n  d  {:<15} {:>7}  {:<18} {:>7}\n", "estimator",
             "fitted", "95 % (jointly)", "theory");
  for (const auto& s : file["summary"]["slopes"]) {
    fmt::print("  {}  {:<15} {:>7.3f}  [{:.3f}, {:.3f}]   {:>7.3f}\n", s["d"].get<int>(),
               s["estimator"].get<std::string>(), s["slope"].get<double>(), s["low"].get<double>(),
               s["high"].get<double>(), s["theory"].get<double>());
  }
}

int run(Options o) {
  o.run.sizes = experiments::rate_sizes(o.quick ? 2 : 4);
  if (o.quick) o.run.repetitions = 6;
  return run_and_print("rates", o.common, o.run, print);
}

}  // namespace

void add_reproduce_rates(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "rates", "Convergence rates of global linear, local constant and local linear regression");
  add_common_options(*command, o->common, "out/rates", false);
  command->add_flag("--quick", o->quick, "Fewer sample sizes and repetitions, under a minute");
  command->add_option("--d", o->run.dims, "Dimension, 1 to 4; repeatable; default all")->check(whole_number(1, 4));
  command->add_option("--noise", o->run.noise, "Standard deviation of the noise")
      ->capture_default_str()
      ->check(number_above(0));
  command->add_option("--bandwidth", o->run.bandwidth, "Constant in front of the bandwidths' theoretical order")
      ->capture_default_str()
      ->check(number_above(0));
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
