#include <algorithm>
#include <cstring>

#include "core/text.hpp"
#include "plan/backends.hpp"
#include "plan/implementation.hpp"

namespace lla::core {

// A constant, not an object made at first use: calls may come from static destructors, from threads that outlive main
// and from forked children.
std::span<const Implementation* const> implementations() {
  static constexpr const Implementation* list[] = {
#if LLA_HAVE_CUDA
    &cuda::sm90::implementation,
    &cuda::portable::implementation,
#endif
    &cpu::implementation,
    &reference::implementation,
  };
  return list;
}

namespace {

// Empty when the implementation takes the problem on this machine.
std::string refusal(const Implementation& i, const Problem& p, const Machine& m) {
  if (i.device != p.device) return i.device == Device::cuda ? "takes CUDA tensors only" : "takes CPU tensors only";
  if (i.device == Device::cuda && !m.cuda.present) return m.cuda.absent_reason;
  return i.refuse(p, m);
}

std::string known_names() {
  std::string names;
  for (const Implementation* i : implementations()) names += cat(names.empty() ? "" : ", ", i->name);
  return names;
}

}  // namespace

Status make_plan(const Problem& p, const Machine& m, const char* wanted, Plan& plan) {
  const auto asked = [&](const Implementation* i) { return wanted == nullptr || std::strcmp(i->name, wanted) == 0; };
  for (const Implementation* i : implementations()) {
    if (i->device != p.device || !asked(i) || !refusal(*i, p, m).empty()) continue;
    plan = i->plan(p, m);
    plan.implementation = i;
    return {};
  }
  // Gathered only now: calls that find someone need no text. Without a device all of CUDA's have the one reason.
  const bool no_device = p.device == Device::cuda && !m.cuda.present;
  bool known = false;
  std::string reasons = no_device ? cat("no CUDA device: ", m.cuda.absent_reason) : "";
  for (const Implementation* i : implementations()) {
    if (!asked(i)) continue;
    known = true;
    if (no_device && i->device == Device::cuda) continue;
    reasons += cat(reasons.empty() ? "" : "; ", i->name, ": ", refusal(*i, p, m));
  }
  if (!known)
    return invalid(cat("options.implementation: \"", wanted, "\" is not in this build, which has ", known_names()));
  if (wanted != nullptr)
    return {LLA_UNSUPPORTED, cat("options.implementation: it does not take this problem (", reasons, ")")};
  return {LLA_UNSUPPORTED, cat("no implementation takes this problem (", reasons, ")")};
}

std::string explain(const Problem& p, const Machine& m) {
  std::string out;
  for (const Implementation* i : implementations()) {
    const std::string reason = refusal(*i, p, m);
    out += reason.empty() ? cat(i->name, ": yes\n") : cat(i->name, ": no, ", reason, "\n");
  }
  return out;
}

std::string Plan::text(const Problem& p, const Machine& m) const {
  const auto solver_name = solver == Solver::cg ? "cg" : solver == Solver::direct ? "direct" : "auto";
  std::string out = cat("implementation: ", implementation->name, "\nworkspace: ", workspace_bytes,
                        " bytes\nsolver: ", solver_name, "\nweights: ", cached_weights ? "cached" : "recomputed",
                        "\nblock: ", block_rows, " queries x ", block_keys, " keys\nworkers: ", workers, "\n");
  for (const auto& [key, value] : implementation->notes(p, m, *this)) out += cat(key, ": ", value, "\n");
  return out;
}

}  // namespace lla::core
