// `lla reproduce memory`: working set and time against the length (the paper's figure on memory).
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>

#include "commands.hpp"
#include "memory/run.hpp"
#include "numbers.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

struct Options {
  CommonOptions common;
  bool quick = false;
  double limit_gib = 0;
  experiments::MemoryRun run;
};

int run(Options o) {
  o.run.out = o.common.out;
  o.run.seed = o.common.seed;
  o.run.device = o.common.device_kind();
  o.run.command = command_line();
  o.run.limit_bytes = o.limit_gib > 0 ? o.limit_gib * (1 << 30) : experiments::default_memory_limit();
  for (int64_t n = 256; n <= (o.quick ? 4096 : 16384); n *= 2) o.run.lengths.push_back(n);
  bool finished;
  {
    const Session session("memory");
    finished = experiments::run(o.run, session.progress());
  }
  if (!finished) return finish(o.common.out, false);
  const auto file = experiments::read_results(o.run.out / experiments::kResultsName);
  fmt::print("{:>7}  {:<10} {:>12} {:>10}\n", "n", "method", "peak MiB", "seconds");
  for (const auto& r : file["records"]) {
    const double mib = r["peak_bytes"].get<double>() / (1 << 20);
    if (r["fits"].get<bool>()) {
      fmt::print("{:>7}  {:<10} {:>12.1f} {:>10.3f}\n", r["n"].get<int64_t>(), r["method"].get<std::string>(), mib,
                 r["seconds"].get<double>());
    } else {
      fmt::print("{:>7}  {:<10} {:>12.1f} {:>10}\n", r["n"].get<int64_t>(), r["method"].get<std::string>(), mib,
                 "too large");
    }
  }
  fmt::print("\nExponents of n\n");
  for (const auto& e : file["summary"]["exponents"]) {
    fmt::print("  {:<10} memory {:.2f}, time {:.2f}\n", e["method"].get<std::string>(), e["memory"].get<double>(),
               e["time"].get<double>());
  }
  return finish(o.common.out, true);
}

}  // namespace

void add_reproduce_memory(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      reproduce.add_subcommand("memory", "Peak memory and time of naive LLA, blockwise LLA and softmax attention");
  add_common_options(*command, o->common, "out/memory", true);
  command->add_flag("--quick", o->quick, "Lengths up to 4096");
  command->add_option("--d", o->run.dim, "Head dimension")->capture_default_str()->check(whole_number(1, 256));
  command->add_option("--ridge", o->run.ridge, "LLA's ridge")->capture_default_str()->check(number_from(0));
  command->add_option("--limit", o->limit_gib, "GiB the naive method may use; default half of what is available")
      ->check(number_above(0));
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
