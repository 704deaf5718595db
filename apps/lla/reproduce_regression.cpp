// `lla reproduce regression`: test-time regression on piecewise linear data (the paper's section 4).
#include <CLI/CLI.hpp>

#include <cmath>
#include <map>
#include <memory>
#include <vector>

#include <fmt/core.h>

#include "commands.hpp"
#include "lla/lla.h"
#include "numbers.hpp"
#include "regression/run.hpp"
#include "regression/timing.hpp"
#include "reproduce.hpp"

namespace lla::app {
namespace {

using experiments::Json;
using experiments::RegressionSetting;

struct Options {
  CommonOptions common;
  bool quick = false, paper = false;
  std::vector<int> dims, segments;
  std::vector<double> ridges{0.1}, scales, noises{0.1};
  double mesa_ridge = 1;
  int sequences = 0;
  std::string implementation;
};

constexpr int kQuickSequences = 128;
constexpr int kDefaultSequences = 1000;

// The quick subset: every setting of the paper's main figure, and one segment length across the dimensions.
const std::vector<std::pair<int, int>> kQuick = {{8, 256},  {16, 256}, {32, 256},  {64, 64},
                                                 {64, 256}, {64, 512}, {64, 1024}, {128, 256}};

std::vector<std::pair<int, int>> grid(const Options& o) {
  if (o.quick && o.dims.empty() && o.segments.empty()) return kQuick;
  const auto dims =
      o.dims.empty() ? std::vector<int>(experiments::kPaperDims.begin(), experiments::kPaperDims.end()) : o.dims;
  const auto segments = o.segments.empty()
                            ? std::vector<int>(experiments::kPaperSegments.begin(), experiments::kPaperSegments.end())
                            : o.segments;
  std::vector<std::pair<int, int>> pairs;
  for (int d : dims) {
    for (int s : segments) pairs.emplace_back(d, s);
  }
  return pairs;
}

std::vector<RegressionSetting> settings(const Options& o) {
  const int sequences = o.sequences > 0 ? o.sequences
                        : o.paper       ? experiments::kPaperSequences
                        : o.quick       ? kQuickSequences
                                        : kDefaultSequences;
  std::vector<RegressionSetting> list;
  for (const auto& [d, segment] : grid(o)) {
    const auto scales = o.scales.empty() ? std::vector<double>{1 / std::sqrt(double(d))} : o.scales;
    for (double ridge : o.ridges) {
      for (double scale : scales) {
        for (double noise : o.noises) {
          list.push_back({.d = d,
                          .segment = segment,
                          .sequences = sequences,
                          .ridge = ridge,
                          .mesa_ridge = o.mesa_ridge,
                          .scale = scale,
                          .noise = noise,
                          .seed = o.common.seed});
        }
      }
    }
  }
  return list;
}

// One line a setting: the mean error of each model, inclusive and strict.
void print_table(const std::string& out) {
  const Json file = experiments::read_results(experiments::fs::path(out) / experiments::kResultsName);
  fmt::print("Mean squared error over all positions, summed over the d outputs\n\n{:>4} {:>8} {:>6} {:>9}", "d",
             "segment", "ridge", "form");
  for (const char* model : experiments::kModelNames) fmt::print(" {:>11}", model);
  fmt::print("\n");
  for (const Json& record : file["records"]) {
    if (record["model"] != "lla") continue;
    fmt::print("{:>4} {:>8} {:>6} {:>9}", record["d"].get<int>(), record["segment"].get<int>(),
               record["ridge"].get<double>(), record["strict"].get<bool>() ? "strict" : "inclusive");
    for (const char* model : experiments::kModelNames) {
      Json key = record;
      for (const char* other : {"ridge", "mse", "mse_mean"}) key.erase(other);
      key["model"] = model;
      const bool swept = std::string(model) == "lla";
      for (const Json& r : file["records"]) {
        if (!experiments::Results::matches(r, key) || (swept && r["ridge"] != record["ridge"])) continue;
        fmt::print(" {:>11.4g}", r["mse_mean"].get<double>());
        break;
      }
    }
    fmt::print("\n");
  }
}

// Asked before a folder is made.
void require_implementation(const std::string& name) {
  if (name.empty()) return;
  std::string names;
  for (int32_t i = 0; const char* known = lla_implementation_name(i); ++i) {
    if (name == known) return;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  throw CLI::ValidationError("--implementation", fmt::format("this build has no \"{}\"; it has {}", name, names));
}

int run(const Options& o) {
  require_implementation(o.implementation);
  experiments::RegressionRun request;
  request.settings = settings(o);
  request.out = o.common.out;
  request.command = command_line();
  request.device = o.common.device_kind();
  request.implementation = o.implementation;
  experiments::RunSummary summary;
  {
    const Session session("regression");
    summary = experiments::run(request, session.progress());
  }
  if (!summary.finished) return finish(o.common.out, false);
  print_table(o.common.out);
  if (summary.kernel_seconds > 0) {
    experiments::write_timing(request.out, summary);
    fmt::print("\n{:.1f} s, {:.0f} % of it inside the models\n", summary.seconds,
               100 * summary.kernel_seconds / summary.seconds);
  }
  return finish(o.common.out, true);
}

}  // namespace

void add_reproduce_regression(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "regression", "Test-time regression on piecewise linear data: LLA, softmax, linear attention, MesaNet, random");
  add_common_options(*command, o->common, "out/regression", true);
  auto* quick = command->add_flag("--quick", o->quick, "A subset of the settings, about a minute");
  command->add_flag("--paper", o->paper, "All 40 settings with 10,000 sequences, hours")->excludes(quick);
  const std::vector<int> dims(experiments::kPaperDims.begin(), experiments::kPaperDims.end());
  const std::vector<int> segments(experiments::kPaperSegments.begin(), experiments::kPaperSegments.end());
  command->add_option("--d", o->dims, "Dimension; repeatable; default all")
      ->check(whole_number(1, 256))
      ->check(CLI::IsMember(dims));
  command->add_option("--segment", o->segments, "Segment length; repeatable; default all")
      ->check(whole_number(1, 1024))
      ->check(CLI::IsMember(segments));
  command->add_option("--sequences", o->sequences, "Sequences per setting; default 1,000, quick 128, paper 10,000")
      ->check(whole_number(1, 1 << 30));
  command->add_option("--ridge", o->ridges, "LLA's ridge; repeatable for a sweep")
      ->check(number_from(0))
      ->capture_default_str();
  command->add_option("--mesa-ridge", o->mesa_ridge, "MesaNet's ridge")->check(number_above(0))->capture_default_str();
  command->add_option("--scale", o->scales, "Of the logits; repeatable; default 1/sqrt(d)")->check(number_above(0));
  command->add_option("--noise", o->noises, "Standard deviation of the values' noise; repeatable")
      ->check(number_from(0))
      ->capture_default_str();
  command->add_option("--implementation", o->implementation,
                      "Of the attention (lla info lists them); default the library's choice");
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
