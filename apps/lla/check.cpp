// `lla check`: every implementation of this build against the fp64 reference, on this machine.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "check_cases.hpp"
#include "check_run.hpp"
#include "commands.hpp"
#include "core/text.hpp"
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
};

// One case on one implementation.
struct Outcome {
  const CheckCase* checked;
  const core::Implementation* implementation;
  std::string refused, failed;  // as in CheckResult
  CheckErrors errors{};

  bool ok() const {
    const CheckGates gates = check_gates(*checked);
    return failed.empty() && (!refused.empty() || (errors.output <= gates.output && errors.gradients <= gates.gradients));
  }
};

std::string implementation_names() {
  std::string names;
  for (const core::Implementation* i : core::implementations()) names += (names.empty() ? "" : ", ") + std::string(i->name);
  return names;
}

// What there is to check, after the user's choice; says what is left out and why.
std::vector<const core::Implementation*> chosen(const Options& options) {
  for (const std::string& name : options.implementations) {
    const auto& all = core::implementations();
    if (std::none_of(all.begin(), all.end(), [&](const auto* i) { return name == i->name; })) {
      throw CLI::ValidationError("--implementation", fmt::format("this build has no \"{}\"; it has {}", name, implementation_names()));
    }
    if (name == "reference") throw CLI::ValidationError("--implementation", "the reference is what the others are compared with");
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
      if (named) throw CLI::ValidationError("--implementation", fmt::format("{} needs a CUDA device ({})", i->name, cuda.absent_reason));
      fmt::print("{} is not checked: {}\n", i->name, cuda.absent_reason);
      continue;
    }
    list.push_back(i);
  }
  if (list.empty()) throw CLI::ValidationError("check", "there is no implementation to check with these options");
  return list;
}

std::vector<Outcome> run(const std::vector<CheckCase>& cases, const std::vector<const core::Implementation*>& implementations) {
  std::vector<Outcome> outcomes;
  Progress progress("check", static_cast<int64_t>(cases.size()));
  uint64_t seed = 1;
  for (const CheckCase& c : cases) {
    const CheckInputs inputs = make_check_inputs(c, seed++);
    const CheckResult reference = run_reference(c, inputs);
    if (!reference.failed.empty() || !reference.refused.empty()) {
      throw std::runtime_error("the reference itself failed on " + c.text() + ": " + reference.failed + reference.refused);
    }
    for (const core::Implementation* i : implementations) {
      const CheckResult result = run_implementation(c, inputs, *i);
      Outcome outcome{&c, i, result.refused, result.failed};
      if (result.refused.empty() && result.failed.empty()) outcome.errors = check_errors(c, reference, result);
      outcomes.push_back(std::move(outcome));
    }
    progress.advance();
  }
  return outcomes;
}

// The cases that share a gate, in one line of the table.
struct Line {
  int cases = 0, refused = 0, bad = 0;
  CheckErrors worst{0, 0, ""};
  CheckGates gates{};

  void add(const Outcome& o) {
    ++cases;
    gates = check_gates(*o.checked);
    if (!o.refused.empty()) ++refused;
    if (!o.ok()) ++bad;
    if (!(o.errors.output <= worst.output)) worst.output = o.errors.output;
    if (!(o.errors.gradients <= worst.gradients)) {
      worst.gradients = o.errors.gradients;
      worst.worst_gradient = o.errors.worst_gradient;
    }
  }
};

void print_table(const std::vector<Outcome>& outcomes) {
  std::vector<std::pair<std::string, Line>> lines;
  for (const Outcome& o : outcomes) {
    const bool given = o.checked->ridge == core::RidgeShape::none;
    const std::string key = fmt::format("{:<14} {:<5} {:<8}", o.implementation->name, core::name(o.checked->dtype),
                                        given ? "x given" : fmt::format("{}", o.checked->lambda));
    auto at = std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.first == key; });
    if (at == lines.end()) at = lines.insert(lines.end(), {key, {}});
    at->second.add(o);
  }
  std::stable_sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) {
    return a.first.substr(0, 14) < b.first.substr(0, 14);
  });
  fmt::print("{:<14} {:<5} {:<8} {:>5}  {:>8} {:>8}  {:>8} {:>8}  {:<6}\n", "implementation", "dtype", "ridge", "cases", "output", "gate",
             "gradient", "gate", "worst");
  for (const auto& [key, line] : lines) {
    std::string verdict = line.bad ? fmt::format("{} BAD", line.bad) : "ok";
    if (line.refused == line.cases) verdict = "refused";
    else if (line.refused) verdict += fmt::format(", {} refused", line.refused);
    fmt::print("{} {:>5}  {:>8.1e} {:>8.1e}  {:>8.1e} {:>8.1e}  {:<6}  {}\n", key, line.cases, line.worst.output, line.gates.output,
               line.worst.gradients, line.gates.gradients, line.worst.worst_gradient, verdict);
  }
}

void print_case(const Outcome& o) {
  fmt::print("{} {}: {}: ", o.ok() ? "ok " : "BAD", o.implementation->name, o.checked->text());
  if (!o.failed.empty()) {
    fmt::print("{}\n", o.failed);
  } else if (!o.refused.empty()) {
    fmt::print("refused, {}\n", o.refused);
  } else {
    const CheckGates gates = check_gates(*o.checked);
    fmt::print("output {:.1e} (gate {:.1e}), {} {:.1e} (gate {:.1e})\n", o.errors.output, gates.output, o.errors.worst_gradient,
               o.errors.gradients, gates.gradients);
  }
}

void write_json(const std::string& path, const std::vector<Outcome>& outcomes) {
  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  for (const Outcome& o : outcomes) {
    const CheckGates gates = check_gates(*o.checked);
    nlohmann::ordered_json entry = {{"implementation", o.implementation->name}, {"case", o.checked->text()}, {"ok", o.ok()}};
    if (!o.failed.empty()) entry["failed"] = o.failed;
    else if (!o.refused.empty()) entry["refused"] = o.refused;
    else {
      entry["output"] = {{"error", o.errors.output}, {"gate", gates.output}};
      entry["gradients"] = {{"error", o.errors.gradients}, {"gate", gates.gradients}, {"worst", o.errors.worst_gradient}};
    }
    cases.push_back(std::move(entry));
  }
  const nlohmann::ordered_json all = {{"version", lla_version()}, {"machine", lla_machine_description()}, {"cases", cases}};
  std::ofstream file(path);
  file << all.dump(2) << '\n';
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

int check(const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto implementations = chosen(options);
  const std::vector<CheckCase> cases = check_cases(options.quick);
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
    if (o.refused.empty()) idle.erase(o.implementation);
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
  CLI::App* command = root.add_subcommand("check", "Compare every implementation with the fp64 reference on this machine");
  command->footer(
      "Errors are relative norms in the worst batch entry and head. Exit code: 0 when all are within their gates, 1 when one\n"
      "is not, 2 when there is nothing to check.");
  auto options = std::make_shared<Options>();
  command->add_flag("--quick", options->quick, "A subset in seconds instead of every combination");
  command->add_option("--implementation", options->implementations, "Only this one (repeatable); `lla info` lists them")->type_name("NAME");
  command->add_option("--device", options->device, "cpu, cuda or all")->check(CLI::IsMember({"cpu", "cuda", "all"}))->capture_default_str();
  command->add_flag("--verbose", options->verbose, "Print every case");
  command->add_option("--json", options->json, "Also write the results to this file")->type_name("FILE");
  command->callback([options, &exit_code] { exit_code = check(*options); });
}

}  // namespace lla::app
