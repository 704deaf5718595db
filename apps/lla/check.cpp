// `lla check`: every implementation of this build against the fp64 reference, on this machine.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "check_cases.hpp"
#include "check_replay.hpp"
#include "check_run.hpp"
#include "commands.hpp"
#include "core/text.hpp"
#include "files.hpp"
#include "numbers.hpp"
#include "plan/machine.hpp"
#include "progress.hpp"

namespace lla::app {
namespace {

struct Options {
  bool quick = false;
  bool verbose = false;
  std::vector<std::string> implementations;
  std::string device = "all";
  std::string json;
  std::string filter;
  std::string replay;
};

// One case on one implementation.
struct Outcome {
  const CheckCase* checked;
  const core::Implementation* implementation;
  CheckCall forward, backward;
  CheckErrors errors;

  bool ok() const {
    const CheckGates gates = check_gates(*checked);
    return forward.failed.empty() && backward.failed.empty() && errors.output <= gates.output &&
           errors.gradients <= gates.gradients;
  }
};

std::string implementation_names() {
  std::string names;
  for (const core::Implementation* i : core::implementations())
    names += (names.empty() ? "" : ", ") + std::string(i->name);
  return names;
}

// What there is to check, after the user's choice; says what is left out and why.
std::vector<const core::Implementation*> chosen(const Options& options) {
  for (const std::string& name : options.implementations) {
    const auto& all = core::implementations();
    if (std::none_of(all.begin(), all.end(), [&](const auto* i) { return name == i->name; })) {
      throw CLI::ValidationError("--implementation",
                                 fmt::format("this build has no \"{}\"; it has {}", name, implementation_names()));
    }
    if (name == "reference")
      throw CLI::ValidationError("--implementation", "the reference is what the others are compared with");
  }
  const core::CudaDevice cuda = core::this_machine(0).cuda;
  if (options.device == "cuda" && !cuda.present) {
    throw CLI::ValidationError("--device", fmt::format("there is no CUDA device to check on ({})", cuda.absent_reason));
  }
  std::vector<const core::Implementation*> list;
  for (const core::Implementation* i : core::implementations()) {
    const std::string device = i->device == core::Device::cuda ? "cuda" : "cpu";
    const bool named = std::count(options.implementations.begin(), options.implementations.end(), i->name) > 0;
    if (std::string_view(i->name) == "reference") continue;
    if (!options.implementations.empty() && !named) continue;
    if (options.device != "all" && options.device != device) continue;
    if (device == "cuda" && !cuda.present) {
      if (named)
        throw CLI::ValidationError("--implementation",
                                   fmt::format("{} needs a CUDA device ({})", i->name, cuda.absent_reason));
      fmt::print("{} is not checked: {}\n", i->name, cuda.absent_reason);
      continue;
    }
    list.push_back(i);
  }
  if (list.empty()) throw CLI::ValidationError("check", "there is no implementation to check with these options");
  return list;
}

std::vector<Outcome> run(const std::vector<CheckCase>& cases,
                         const std::vector<const core::Implementation*>& implementations) {
  std::vector<Outcome> outcomes;
  Progress progress("check", static_cast<int64_t>(cases.size()));
  for (const CheckCase& c : cases) {
    const CheckInputs inputs = make_check_inputs(c);
    const CheckResult reference = run_reference(c, inputs);
    if (!reference.forward.done() || !reference.backward.done()) {
      throw std::runtime_error(fmt::format("the reference itself failed on {}: {}{}", c.text(),
                                           reference.forward.failed, reference.backward.failed));
    }
    std::optional<CheckResult> moved;
    if (c.conditioned()) moved = run_reference(c, perturbed(c, inputs));
    for (const core::Implementation* i : implementations) {
      const CheckResult result = run_implementation(c, inputs, *i);
      outcomes.push_back({&c, i, result.forward, result.backward,
                          check_errors(c, inputs, reference, result, moved ? &*moved : nullptr)});
    }
    progress.advance();
  }
  return outcomes;
}

// The cases that share their gates, in one line of the table.
struct Line {
  int cases = 0, bad = 0;
  int forwards = 0, backwards = 0;  // calls that were taken
  CheckErrors worst;
  CheckGates gates{};

  void add(const Outcome& o) {
    ++cases;
    gates = check_gates(*o.checked);
    bad += !o.ok();
    forwards += o.forward.refused.empty();
    backwards += o.backward.refused.empty();
    if (!(o.errors.output <= worst.output)) worst.output = o.errors.output;
    if (!(o.errors.gradients <= worst.gradients)) {
      worst.gradients = o.errors.gradients;
      worst.worst_gradient = o.errors.worst_gradient;
    }
  }

  std::string verdict() const {
    std::string text = bad ? fmt::format("{} BAD", bad) : forwards + backwards > 0 ? "ok" : "";
    const auto refusals = [&](int taken, const char* call) {
      if (taken == cases) return;
      text += fmt::format("{}{} {} refused", text.empty() ? "" : ", ",
                          taken == 0 ? "every" : fmt::format("{}", cases - taken), call);
    };
    refusals(forwards, "forward");
    refusals(backwards, "backward");
    return text;
  }
};

void print_table(const std::vector<Outcome>& outcomes) {
  // In the order of implementations, dtypes and ridges.
  using Key = std::tuple<const core::Implementation*, DType, std::string, double>;
  std::vector<std::pair<Key, Line>> lines;
  for (const core::Implementation* i : core::implementations()) {
    for (const Outcome& o : outcomes) {
      if (o.implementation != i) continue;
      const std::string group = o.checked->degenerate() ? "degenerate" : o.checked->trained() ? "trained" : "";
      const double ridge = !group.empty() || o.checked->ridge == core::RidgeShape::none ? 0 : o.checked->lambda;
      const Key key{i, o.checked->dtype, group, ridge};
      auto at = std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.first == key; });
      if (at == lines.end()) at = lines.insert(lines.end(), {key, {}});
      at->second.add(o);
    }
  }
  const auto number = [](bool any, double x) { return any ? fmt::format("{:.1e}", x) : std::string("-"); };
  fmt::print("{:<14} {:<5} {:<10} {:>5}  {:>8} {:>8}  {:>8} {:>8}  {:<6}\n", "implementation", "dtype", "ridge",
             "cases", "output", "gate", "gradient", "gate", "worst");
  for (const auto& [key, line] : lines) {
    const auto& [implementation, dtype, group, ridge] = key;
    fmt::print("{:<14} {:<5} {:<10} {:>5}  {:>8} {:>8.1e}  {:>8} {:>8.1e}  {:<6}  {}\n", implementation->name,
               core::name(dtype),
               !group.empty() ? group
               : ridge == 0   ? "x given"
                              : fmt::format("~ {}", ridge),
               line.cases, number(line.forwards > 0, line.worst.output), line.gates.output,
               number(line.backwards > 0, line.worst.gradients), line.gates.gradients, line.worst.worst_gradient,
               line.verdict());
  }
  std::set<std::string> reasons;
  for (const Outcome& o : outcomes) {
    for (const CheckCall* call : {&o.forward, &o.backward}) {
      if (!call->refused.empty()) reasons.insert(fmt::format("{}: {}", o.implementation->name, call->refused));
    }
  }
  if (!reasons.empty()) fmt::print("\nRefused, so not compared:\n");
  for (const std::string& reason : reasons) fmt::print("  {}\n", reason);
}

std::string call_text(const CheckCall& call, const char* what, double error, double gate) {
  if (!call.failed.empty()) return fmt::format("{} FAILED: {}", what, call.failed);
  if (!call.refused.empty()) return fmt::format("{} refused", what);
  return fmt::format("{} {:.1e} (gate {:.1e})", what, error, gate);
}

void print_case(const Outcome& o) {
  const CheckGates gates = check_gates(*o.checked);
  const char* gradient = *o.errors.worst_gradient ? o.errors.worst_gradient : "gradients";
  fmt::print("{} {}: {}: {}, {}\n", o.ok() ? "ok " : "BAD", o.implementation->name, o.checked->text(),
             call_text(o.forward, "output", o.errors.output, gates.output),
             call_text(o.backward, gradient, o.errors.gradients, gates.gradients));
}

void write_json(const std::string& path, const std::vector<Outcome>& outcomes) {
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  for (const Outcome& o : outcomes) {
    const CheckGates gates = check_gates(*o.checked);
    const auto describe = [](const CheckCall& call, double error, double gate) -> nlohmann::ordered_json {
      if (!call.failed.empty()) return {{"failed", call.failed}};
      if (!call.refused.empty()) return {{"refused", call.refused}};
      return {{"error", error}, {"gate", gate}};
    };
    nlohmann::ordered_json entry = {{"implementation", o.implementation->name},
                                    {"case", o.checked->text()},
                                    {"ok", o.ok()},
                                    {"output", describe(o.forward, o.errors.output, gates.output)},
                                    {"gradients", describe(o.backward, o.errors.gradients, gates.gradients)}};
    cases.push_back(std::move(entry));
  }
  const nlohmann::ordered_json all = {
      {"version", lla_version()}, {"machine", lla_machine_description()}, {"cases", cases}};
  write_file(path, all.dump(2) + "\n");
}

int check(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto implementations = chosen(options);
  if (!options.replay.empty()) return replay(options.replay, implementations) ? kSuccess : kFailed;
  if (!options.json.empty()) require_writable(options.json);
  const std::vector<CheckCase> all = check_cases(options.quick);
  std::vector<CheckCase> cases;
  std::copy_if(all.begin(), all.end(), std::back_inserter(cases),
               [&](const CheckCase& c) { return c.text().find(options.filter) != std::string::npos; });
  if (cases.empty())
    throw CLI::ValidationError("--filter",
                               fmt::format("no case mentions \"{}\"; --verbose shows them", options.filter));
  fmt::print("lla {} against its fp64 reference: {} cases, forward and backward\n{}\n", lla_version(), cases.size(),
             lla_machine_description());
  std::fflush(stdout);
  const std::vector<Outcome> outcomes = run(cases, implementations);

  if (options.verbose) {
    for (const Outcome& o : outcomes) print_case(o);
    fmt::print("\n");
  }
  print_table(outcomes);
  if (!options.json.empty()) write_json(options.json, outcomes);

  // An implementation that takes nothing has not been checked.
  std::set<const core::Implementation*> idle(implementations.begin(), implementations.end());
  for (const Outcome& o : outcomes) {
    if (o.forward.refused.empty()) idle.erase(o.implementation);
  }
  for (const core::Implementation* i : idle) fmt::print("\nBAD {} refused every case\n", i->name);

  const auto bad = std::count_if(outcomes.begin(), outcomes.end(), [](const Outcome& o) { return !o.ok(); });
  if (bad > 0) {
    fmt::print("\n");
    for (const Outcome& o : outcomes) {
      if (!o.ok()) print_case(o);
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("\n{} of {} results within their gates ({:.1f} s)\n", outcomes.size() - bad, outcomes.size(), seconds);
  return bad == 0 && idle.empty() ? kSuccess : kFailed;
}

}  // namespace

void add_check(CLI::App& root, int& exit_code) {
  CLI::App* command =
      root.add_subcommand("check", "Compare every implementation with the fp64 reference on this machine");
  command->footer(
      "Errors are relative norms in the worst batch entry and head (of dridge: over the whole, relative to the terms "
      "it sums up).\n"
      "Degenerate data (repeated, zero, of very different size) is forgiven what roundings of the inputs alone would "
      "change.\n"
      "Exit code: 0 when all are within their gates, 1 when one is not, 2 when there is nothing to check.");
  auto options = std::make_shared<Options>();
  command->add_flag("--quick", options->quick, "A subset in seconds instead of every combination");
  command->add_option("--implementation", options->implementations, "Only this one (repeatable); `lla info` lists them")
      ->type_name("NAME");
  command->add_option("--device", options->device, "cpu, cuda or all")
      ->check(CLI::IsMember({"cpu", "cuda", "all"}).description(""))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_option("--filter", options->filter, "Only cases whose description (see --verbose) contains this")
      ->type_name("TEXT");
  command
      ->add_option("--replay", options->replay,
                   "Instead, run the inputs saved in this file (check=\"raise\" in Python writes it)")
      ->excludes("--quick")
      ->excludes("--filter")
      ->type_name("FILE");
  command->add_flag("--verbose", options->verbose, "Print every case");
  command->add_option("--json", options->json, "Also write the results to this file")
      ->check(not_empty())
      ->type_name("FILE");
  command->callback([options, &exit_code] { exit_code = check(*options); });
}

}  // namespace lla::app
