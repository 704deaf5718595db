// `lla reproduce regression`: test-time regression on piecewise linear data (the paper's section 4).
#include <CLI/CLI.hpp>

#include <cmath>
#include <memory>
#include <optional>
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
  bool quick = false, paper = false, qk_norm = false;
  std::string study;
  std::vector<int> dims, segments;
  std::vector<double> ridges{0.1}, mesa_ridges{1}, scales, noises{0.1}, query_noises;
  std::vector<std::string> kernels{"dot"};
  int sequences = 0;
  std::string implementation;
};

constexpr int kQuickSequences = 128;
constexpr int kDefaultSequences = 1000;
constexpr const char* kDefaultOut = "out/regression";

// The quick subset: every setting of the paper's main figure, and one segment length across the dimensions.
const std::vector<std::pair<int, int>> kQuick = {{8, 256},  {16, 256}, {32, 256},  {64, 64},
                                                 {64, 256}, {64, 512}, {64, 1024}, {128, 256}};

std::vector<std::pair<int, int>> grid(const Options& o) {
  if (o.quick && o.study.empty() && o.dims.empty() && o.segments.empty()) return kQuick;
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

// The settings one set of options stands for.
std::vector<RegressionSetting> settings(const Options& o) {
  const int sequences = o.sequences > 0 ? o.sequences
                        : o.paper       ? experiments::kPaperSequences
                        : o.quick       ? kQuickSequences
                                        : kDefaultSequences;
  std::vector<std::optional<double>> queries{std::nullopt};
  if (!o.query_noises.empty()) queries.assign(o.query_noises.begin(), o.query_noises.end());
  std::vector<RegressionSetting> list;
  for (const auto& [d, segment] : grid(o)) {
    for (double scale : o.scales.empty() ? std::vector<double>{1 / std::sqrt(double(d))} : o.scales) {
      for (double noise : o.noises) {
        for (const std::string& kernel : o.kernels) {
          for (const std::optional<double>& query : queries) {
            list.push_back({.d = d,
                            .segment = segment,
                            .sequences = sequences,
                            .ridges = o.ridges,
                            .mesa_ridges = o.mesa_ridges,
                            .scale = scale,
                            .noise = noise,
                            .kernel = kernel == "rbf" ? experiments::Kernel::rbf : experiments::Kernel::dot,
                            .qk_norm = o.qk_norm,
                            .query_noise = query,
                            .seed = o.common.seed});
          }
        }
      }
    }
  }
  return list;
}

// A study varies what the paper leaves open, and sets all of that itself.
std::vector<RegressionSetting> study(Options o) {
  if (o.segments.empty()) o.segments = o.study == "queries" ? std::vector<int>{256} : std::vector<int>{64, 256, 1024};
  if (o.study == "ridges") {
    o.ridges = {1, 0.1, 0.01};
    o.mesa_ridges = {10, 1, 0.1};
  }
  if (o.study == "queries") o.query_noises = {0, 0.05, 0.1, 0.2, 0.4, 0.7, 1};
  if (o.study != "kernels") return settings(o);
  o.kernels = {"dot", "rbf"};
  o.qk_norm = false;
  std::vector<RegressionSetting> list = settings(o);
  o.qk_norm = true;
  for (RegressionSetting& s : settings(o)) list.push_back(std::move(s));
  return list;
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

// One line a setting and form: the mean error of each model, LLA and MesaNet with their ridges.
void print_table(const std::string& out) {
  const Json file = experiments::read_results(experiments::fs::path(out) / experiments::kResultsName);
  fmt::print("Mean squared error over all positions, summed over the d outputs\n");
  std::string line;
  for (const Json& r : file["records"]) {
    std::string setting = fmt::format("d {} segment {}", r["d"].get<int>(), r["segment"].get<int>());
    if (r["kernel"] != "dot") setting += " " + r["kernel"].get<std::string>();
    if (r["qk_norm"] == true) setting += " qk-norm";
    if (!r["query_noise"].is_null()) setting += fmt::format(" query noise {}", r["query_noise"].get<double>());
    setting += r["strict"] == true ? ", strict:" : ", inclusive:";
    if (setting != line) fmt::print("\n{:<34}", setting);
    line = setting;
    const bool ridged = r["ridge"].get<double>() != 0;
    fmt::print(" {}{} {:.4g} ", r["model"].get<std::string>(),
               ridged ? fmt::format("({:g})", r["ridge"].get<double>()) : "", r["mse_mean"].get<double>());
  }
  fmt::print("\n");
}

int run(Options o) {
  require_implementation(o.implementation);
  experiments::RegressionRun request;
  request.settings = o.study.empty() ? settings(o) : study(o);
  if (!o.study.empty()) {
    request.task += "-" + o.study;
    if (o.common.out == kDefaultOut) o.common.out += "-" + o.study;
  }
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
  if (summary.model_seconds > 0) {
    experiments::write_timing(request.out, summary);
    fmt::print("\n{:.1f} s, {:.0f} % of it inside the models", summary.seconds,
               100 * summary.model_seconds / summary.seconds);
    if (request.device == experiments::Device::cuda)
      fmt::print("; waited {:.1f} s for the GPU", summary.waited_seconds);
    fmt::print("\n");
  }
  return finish(o.common.out, true);
}

}  // namespace

void add_reproduce_regression(CLI::App& reproduce, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* command = reproduce.add_subcommand(
      "regression", "Test-time regression on piecewise linear data: LLA, softmax, linear attention, MesaNet, random");
  add_common_options(*command, o->common, kDefaultOut, true);
  auto* quick = command->add_flag("--quick", o->quick, "A subset of the settings, about a minute");
  command->add_flag("--paper", o->paper, "All 40 settings with 10,000 sequences: minutes on a large GPU, hours without")
      ->excludes(quick);
  auto* study =
      command
          ->add_option(
              "--study", o->study,
              "What the paper leaves open, on S = 64, 256, 1024: ridges (three each of LLA and MesaNet), kernels "
              "(dot product or RBF, keys normalised or not), queries (S = 256: noise between query and key)")
          ->check(CLI::IsMember({"ridges", "kernels", "queries"}));
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
  command->add_option("--ridge", o->ridges, "LLA's ridge, relative to weights that sum to one; repeatable for a sweep")
      ->excludes(study)
      ->check(number_from(0))
      ->capture_default_str();
  command->add_option("--mesa-ridge", o->mesa_ridges, "MesaNet's ridge, on the plain sum of k k'; repeatable")
      ->excludes(study)
      ->check(number_above(0))
      ->capture_default_str();
  command->add_option("--scale", o->scales, "Of the logits; repeatable; default 1/sqrt(d)")->check(number_above(0));
  command->add_option("--noise", o->noises, "Standard deviation of the values' noise; repeatable")
      ->check(number_from(0))
      ->capture_default_str();
  command
      ->add_option("--kernel", o->kernels,
                   "Of LLA and softmax: dot, exp(scale q.k), or rbf, exp(-|q - k|^2 scale / 2); repeatable")
      ->excludes(study)
      ->check(CLI::IsMember({"dot", "rbf"}))
      ->capture_default_str();
  command->add_flag("--qk-norm", o->qk_norm, "Keys of length sqrt(d), normalised before the values are made from them")
      ->excludes(study);
  command
      ->add_option("--query-noise", o->query_noises,
                   "Queries sqrt(1 - r^2) k + r z with a fresh z, to be answered with A q; r from 0 "
                   "to 1; repeatable")
      ->excludes(study)
      ->check(number_from(0))
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--implementation", o->implementation,
                      "Of the attention (lla info lists them); default the library's choice");
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace lla::app
