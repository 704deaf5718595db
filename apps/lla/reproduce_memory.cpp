// `lla reproduce memory`: working set and time against the length (the paper's figure on memory), and with --decode
// those of a step of generation (its claim for inference).
#include <CLI/CLI.hpp>

#include <memory>

#include <fmt/core.h>

#include "commands.hpp"
#include "memory/run.hpp"
#include "numbers.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

constexpr const char* kOut = "out/memory";

struct Options {
  CommonOptions common;
  bool quick = false, paper = false, decode = false;
  double limit_gib = 0, seconds = 0;
  experiments::MemoryRun run;
  CLI::Option *dims = nullptr, *batches = nullptr;
};

void print(const experiments::Json& file) {
  fmt::print("{:>10}  {:<10} {:>5} {:>4} {:>6} {:>12} {:>10}\n", "n", "method", "type", "d", "batch", "peak MiB",
             "seconds");
  for (const auto& r : file["records"]) {
    const std::string mib =
        r["peak_bytes"].is_null() ? "" : fmt::format("{:.1f}", r["peak_bytes"].get<double>() / (1 << 20));
    const std::string time = r["ran"].get<bool>()    ? fmt::format("{:.4f}", r["seconds"].get<double>())
                             : r["fits"].get<bool>() ? "not run"
                                                     : "too large";
    fmt::print("{:>10}  {:<10} {:>5} {:>4} {:>6} {:>12} {:>10}\n", r["n"].get<int64_t>(),
               r["method"].get<std::string>(), r["dtype"].get<std::string>(), r["d"].get<int>(),
               r["batch"].get<int64_t>(), mib, time);
  }
  fmt::print("\nExponents of n\n");
  for (const auto& e : file["summary"]["exponents"]) {
    fmt::print("  {:<10} {:>5} d {:<4} batch {:<3} memory {:.2f}, time {:.2f}\n", e["method"].get<std::string>(),
               e["dtype"].get<std::string>(), e["d"].get<int>(), e["batch"].get<int64_t>(), e["memory"].get<double>(),
               e["time"].get<double>());
  }
}

int run(Options o) {
  o.run.device = o.common.device_kind();
  o.run.limit_bytes = o.limit_gib > 0 ? o.limit_gib * (1 << 30) : experiments::default_memory_limit();
  // On a GPU a line ends where the device has no room; 2^28 is beyond all of them.
  const bool cuda = o.run.device == experiments::Device::cuda;
  const int64_t longest = o.quick ? 4096 : cuda ? int64_t{1} << 28 : 16384;
  const int64_t longest_cache = o.quick ? 8192 : cuda ? 524288 : 131072;
  for (int64_t n = o.decode ? 1024 : 256; n <= (o.decode ? longest_cache : longest); n *= 2) {
    o.run.lengths.push_back(n);
  }
  if (!cuda && (o.paper || o.seconds > 0)) {
    throw experiments::Failure("--paper and --seconds are for a GPU: give --device cuda too");
  }
  if (cuda && o.limit_gib > 0) {
    throw experiments::Failure("--limit is for the CPU; on a GPU a line ends where the device has no room");
  }
  if (o.seconds > 0) o.run.limit_seconds = o.seconds;
  if (o.paper) o.run.dims = {64, 128}, o.run.batches = {1, 4, 16}, o.run.dtypes = {"bf16", "f32"};
  o.run.decode = o.decode;
  if (o.decode && o.common.out == kOut) o.common.out += "-decode";
  if (o.decode && !o.paper) {
    if (o.dims->empty()) o.run.dims = {64, 128};
    if (o.batches->empty()) o.run.batches = {1, 8};
  }
  return run_and_print(o.decode ? "memory-decode" : "memory", o.common, o.run, print);
}

}  // namespace

void add_reproduce_memory(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      reproduce.add_subcommand("memory", "Peak memory and time of naive LLA, blockwise LLA and softmax attention");
  add_common_options(*command, o->common, kOut, true);
  command->add_flag("--quick", o->quick, "Lengths up to 4096 (8192 with --decode)");
  command->add_flag(
      "--decode", o->decode,
      "One step of generation: memory above a cache of n keys, by default in out/memory-decode, with d = 64 "
      "and 128 and batches of 1 and 8 heads");
  auto* paper =
      command->add_flag("--paper", o->paper, "On a GPU: d = 64 and 128, batches of 1, 4 and 16 heads, bf16 and f32");
  o->dims = command->add_option("--d", o->run.dims, "Head dimension; repeatable")
                ->capture_default_str()
                ->excludes(paper)
                ->check(whole_number(1, 256));
  o->batches =
      command
          ->add_option("--batch", o->run.batches, "Heads at once; repeatable; above 1 on a GPU or with --decode only")
          ->capture_default_str()
          ->excludes(paper)
          ->check(whole_number(1, 1024));
  command->add_option("--dtype", o->run.dtypes, "Of the inputs; repeatable; bf16 on a GPU only")
      ->capture_default_str()
      ->excludes(paper)
      ->check(CLI::IsMember({"f32", "bf16"}));
  command
      ->add_option("--seconds", o->seconds,
                   "On a GPU: calls expected to take longer are not made, only their memory is taken; default 0.2")
      ->check(number_above(0));
  command->add_option("--ridge", o->run.ridge, "LLA's ridge")->capture_default_str()->check(number_from(0));
  command->add_option("--limit", o->limit_gib, "GiB the naive method may use; default half of what is available")
      ->check(number_above(0));
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
