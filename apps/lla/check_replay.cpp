// `lla check --replay FILE`: the inputs of a call that somebody saved (the Python package's check="raise" does), once
// more on every implementation against the reference.
#include "check_replay.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "check_run.hpp"
#include "core/convert.hpp"
#include "core/text.hpp"
#include "data/case_file.hpp"

namespace lla::app {
namespace {

using Arrays = std::map<std::string, data::CaseArray>;

// One head: q (Lq, D), k (Lk, D), v (Lk, Dv), ridge (), (Lq) or (Lq, D), or x (Lq, D); grad_o (Lq, Dv) and options
// (scale, causal, window, tolerance, max_iterations, solver) where the call had them.
struct SavedCall {
  std::string name;
  CheckShape shape;
  CheckMask mask{"causal", true, -1, -1};
  CheckCase checked{};
  CheckInputs inputs;
  bool has_gradient = true;
};

const data::CaseArray& find(const Arrays& arrays, const std::string& call, const char* name, size_t dimensions) {
  const auto at = arrays.find(name);
  if (at == arrays.end()) throw std::runtime_error(fmt::format("{} has no {}", call, name));
  if (at->second.size.size() != dimensions) {
    throw std::runtime_error(
        fmt::format("{} of {} has {} dimensions, not {}", name, call, at->second.size.size(), dimensions));
  }
  return at->second;
}

void need_size(const std::string& call, const char* name, const data::CaseArray& array,
               const std::vector<int64_t>& wanted) {
  if (array.size != wanted) throw std::runtime_error(fmt::format("{} of {} does not fit q, k and v", name, call));
}

core::RidgeShape read_ridge(const Arrays& arrays, SavedCall& call) {
  const data::Sizes& s = call.shape.sizes;
  const auto ridge = arrays.find("ridge");
  if (ridge == arrays.end()) {
    const data::CaseArray& x = find(arrays, call.name, "x", 2);
    need_size(call.name, "x", x, {s.length_q, s.dim});
    call.inputs.x = x.values;
    return core::RidgeShape::none;
  }
  call.inputs.ridge = ridge->second.values;
  switch (ridge->second.size.size()) {
    case 0: return core::RidgeShape::scalar;
    case 1: need_size(call.name, "ridge", ridge->second, {s.length_q}); return core::RidgeShape::token;
    default: need_size(call.name, "ridge", ridge->second, {s.length_q, s.dim}); return core::RidgeShape::dimension;
  }
}

void read_options(const Arrays& arrays, SavedCall& call) {
  call.checked.saved_tolerance = core::default_tolerance(call.checked.dtype);
  const auto found = arrays.find("options");
  if (found == arrays.end()) return;
  const std::vector<double>& o = found->second.values;
  if (o.size() != 7) throw std::runtime_error(fmt::format("options of {} are {} numbers, not 7", call.name, o.size()));
  call.checked.scale = o[0];
  call.mask = {"", o[1] != 0, static_cast<int64_t>(o[2]), static_cast<int64_t>(o[3])};
  if (!std::isnan(o[4])) call.checked.saved_tolerance = o[4];
  call.checked.max_iterations = static_cast<int32_t>(o[5]);
  call.checked.solver = static_cast<Solver>(static_cast<int32_t>(o[6]));
}

SavedCall read_call(const std::string& name, const Arrays& arrays) {
  SavedCall call;
  call.name = name;
  const data::CaseArray &q = find(arrays, name, "q", 2), &k = find(arrays, name, "k", 2),
                        &v = find(arrays, name, "v", 2);
  call.shape = {"saved", {1, q.size[0], k.size[0], 1, 1, q.size[1], v.size[1]}, {}};
  need_size(name, "k", k, {k.size[0], q.size[1]});
  need_size(name, "v", v, {k.size[0], v.size[1]});
  call.checked.dtype = q.dtype;
  call.inputs.q = q.values;
  call.inputs.k = k.values;
  call.inputs.v = v.values;
  call.checked.kind = data::Kind::randn;
  call.checked.ridge = read_ridge(arrays, call);
  read_options(arrays, call);
  const auto& ridge = call.inputs.ridge;
  call.checked.lambda = ridge.empty() ? 1 : *std::min_element(ridge.begin(), ridge.end());
  call.has_gradient = arrays.count("grad_o") > 0;
  if (call.has_gradient) {
    const data::CaseArray& g = find(arrays, name, "grad_o", 2);
    need_size(name, "grad_o", g, {q.size[0], v.size[1]});
    call.inputs.grad_o = g.values;
  } else {
    call.inputs.grad_o.resize(static_cast<size_t>(q.size[0] * v.size[1]));
    for (size_t i = 0; i < call.inputs.grad_o.size(); ++i) {
      alignas(double) unsigned char bytes[sizeof(double)];
      core::store(bytes, q.dtype, 0, data::normal(1, 0, i));
      call.inputs.grad_o[i] = core::load(bytes, q.dtype, 0);
    }
  }
  return call;
}

// A file holds one call, or several with names CALL/ARRAY.
std::vector<SavedCall> read_calls(const std::string& path) {
  std::map<std::string, Arrays> calls;
  for (auto& [name, array] : data::read_case_file(path)) {
    const size_t slash = name.find('/');
    const bool named = slash != std::string::npos;
    calls[named ? name.substr(0, slash) : path][named ? name.substr(slash + 1) : name] = std::move(array);
  }
  if (calls.empty()) throw std::runtime_error(path + " holds no call");
  std::vector<SavedCall> list;
  list.reserve(calls.size());
  for (const auto& [name, arrays] : calls) list.push_back(read_call(name, arrays));
  return list;
}

// What may be expected at the call's own tolerance: docs/testing.md's gates, which hold for a residual of 1e-3, in
// proportion to it.
CheckGates replay_gates(const CheckCase& c) {
  const double rounding = c.dtype == DType::f64 ? 1e-10 : c.dtype == DType::f32 ? 1e-4 : 4e-3;
  const double factor = c.ridge == core::RidgeShape::none ? 0 : c.lambda >= 1 ? 6 : c.lambda >= 0.1 ? 20 : 120;
  return {rounding + 4 * c.tolerance(), rounding + factor * c.tolerance()};
}

int64_t not_finite(const std::vector<double>& reference, const std::vector<double>& values) {
  int64_t count = 0;
  for (size_t i = 0; i < values.size(); ++i) count += std::isfinite(reference[i]) && !std::isfinite(values[i]);
  return count;
}

std::string lost_text(const CheckResult& reference, const CheckResult& result, const char* given) {
  std::string text;
  const auto add = [&](const char* name, const std::vector<double>& want, const std::vector<double>& got) {
    if (const int64_t n = not_finite(want, got)) text += fmt::format("{}{} in {}", text.empty() ? "" : ", ", n, name);
  };
  add("o", reference.o, result.o);
  add("dq", reference.dq, result.dq);
  add("dk", reference.dk, result.dk);
  add("dv", reference.dv, result.dv);
  add(given, reference.dridge, result.dridge);
  return text;
}

bool replay_on(const SavedCall& call, const core::Implementation& implementation, const CheckResult& reference,
               const CheckResult& moved) {
  const CheckResult result = run_implementation(call.checked, call.inputs, implementation);
  for (const CheckCall* part : {&result.forward, &result.backward}) {
    if (!part->failed.empty()) {
      fmt::print("  {:<14} FAILED: {}\n", implementation.name, part->failed);
      return false;
    }
  }
  if (!result.forward.refused.empty()) {
    fmt::print("  {:<14} refuses it: {}\n", implementation.name, result.forward.refused);
    return true;
  }
  const CheckErrors errors = check_errors(call.checked, call.inputs, reference, result, &moved);
  const CheckGates gates = replay_gates(call.checked);
  const std::string lost = lost_text(reference, result, call.checked.ridge == core::RidgeShape::none ? "dx" : "dridge");
  const bool good = lost.empty() && errors.output <= gates.output && errors.gradients <= gates.gradients;
  fmt::print(
      "  {:<14} {}  output {:.1e} (gate {:.1e}), gradients {:.1e}{} (gate {:.1e}); not finite: {}; rows not solved: "
      "{}\n",
      implementation.name, good ? "ok " : "BAD", errors.output, gates.output, errors.gradients,
      *errors.worst_gradient ? fmt::format(" in {}", errors.worst_gradient) : "", gates.gradients,
      lost.empty() ? "none" : lost, result.unsolved());
  return good;
}

}  // namespace

bool replay(const std::string& path, const std::vector<const core::Implementation*>& implementations) {
  std::vector<SavedCall> calls = read_calls(path);
  bool good = true;
  for (SavedCall& call : calls) {
    call.checked.shape = &call.shape;
    call.checked.mask = &call.mask;
    const data::Sizes& s = call.shape.sizes;
    fmt::print("{}: {}, Lq {}, Lk {}, D {}, Dv {}, {}, tolerance {}{}\n", call.name, core::name(call.checked.dtype),
               s.length_q, s.length_k, s.dim, s.value_dim,
               call.inputs.x.empty() ? fmt::format("smallest ridge {:.3g}", call.checked.lambda) : "x given",
               call.checked.tolerance(), call.has_gradient ? "" : "; saved without a gradient, so a random one");
    const CheckResult reference = run_reference(call.checked, call.inputs);
    if (!reference.forward.done() || !reference.backward.done()) {
      throw std::runtime_error(fmt::format("the reference failed on {}: {}{}", call.name, reference.forward.failed,
                                           reference.backward.failed));
    }
    const CheckResult moved = run_reference(call.checked, perturbed(call.checked, call.inputs));
    const auto bad = std::count_if(reference.o.begin(), reference.o.end(), [](double x) { return !std::isfinite(x); });
    if (bad > 0) fmt::print("  the reference itself is not finite in {} elements of o: look at the inputs\n", bad);
    for (const core::Implementation* i : implementations) good &= replay_on(call, *i, reference, moved);
  }
  return good;
}

}  // namespace lla::app
