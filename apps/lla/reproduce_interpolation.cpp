// `lla reproduce interpolation`: the paper's front figure, and the walk from linear to softmax attention.
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>

#include "commands.hpp"
#include "interpolation/run.hpp"
#include "numbers.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

struct Options {
  CommonOptions common;
  experiments::InterpolationRun run;
};

void print(const experiments::Json& file) {
  fmt::print("Root mean squared distance from the function\n\n{:<16} {:>10} {:>10} {:>8}\n", "fit", "bandwidth",
             "ridge", "error");
  const auto text = [](const experiments::Json& x) {
    return x.is_string() ? x.get<std::string>() : fmt::format("{:g}", x.get<double>());
  };
  for (const auto& r : file["records"]) {
    if (r["kind"] == "data") continue;
    fmt::print("{:<16} {:>10} {:>10} {:>8.3f}\n", r["name"].get<std::string>(), text(r["bandwidth"]), text(r["ridge"]),
               r["rms_error"].get<double>());
  }
}

int run(Options o) { return run_and_print("interpolation", o.common, o.run, print); }

}  // namespace

void add_reproduce_interpolation(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "interpolation",
      "Global linear, local constant and local linear fits of one function, and the walk between them");
  add_common_options(*command, o->common, "out/interpolation", false);
  command->add_option("--observations", o->run.observations, "Number of them")
      ->capture_default_str()
      ->check(whole_number(4, 100000));
  command->add_option("--noise", o->run.noise, "Standard deviation of the noise")
      ->capture_default_str()
      ->check(number_from(0));
  command->add_option("--bandwidth", o->run.bandwidth, "Of the local fits")
      ->capture_default_str()
      ->check(number_above(0));
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
