#include "cpu/plan.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "cpu/cost.hpp"
#include "cpu/cpu.hpp"
#include "cpu/decode_run.hpp"
#include "cpu/kernels.hpp"
#include "cpu/layout.hpp"

namespace lla::cpu {
namespace {

// Packed copies of kv heads are kept for as many heads at a time as fit here (one at least).
constexpr int64_t kPackedBytes = int64_t{64} << 20;
// Cached weights of all workers together, unless the caller asks for less: beyond it they would crowd out everything
// else.
constexpr int64_t kCachedBytes = int64_t{96} << 20;
// Below this many multiply-adds a call is done before another thread has woken up.
constexpr double kWorthThreads = 2e6;

int64_t width(const core::Problem& p) { return p.dtype == DType::f64 ? panel_widths().f64 : panel_widths().f32; }
int64_t element(const core::Problem& p) { return p.dtype == DType::f64 ? 8 : 4; }
bool solves(const core::Problem& p) { return !p.given_x(); }

// Keys one panel may see.
int64_t panel_keys(const core::Problem& p) {
  const int64_t all = round_up(p.seqlen_k, kPackRows);
  if (p.mask.left < 0 || p.mask.right < 0) return all;
  const int64_t positions = width(p) / p.group() + 2;
  const int64_t seen = std::min(p.mask.left, p.seqlen_k) + std::min(p.mask.right, p.seqlen_k) + 1 + positions;
  return std::min(all, round_up(seen, kPackRows) + kPackRows);
}

int64_t cached_bytes(const core::Problem& p, int64_t panels, int64_t workers) {
  return panels * workers * panel_keys(p) * width(p) * element(p);
}

int64_t cached_limit(const core::Problem& p) {
  return p.weights == Weights::cached ? p.cached_weights_limit : std::min(p.cached_weights_limit, kCachedBytes);
}

// Multiply-adds of a decoded row in those of one without a matrix.
double decoding_factor(const core::Problem& p) { return p.given_x() ? 1.0 : 1.0 + static_cast<double>(p.dim) / 8; }

int64_t packed_head_bytes(const core::Problem& p, int64_t rows) {
  const bool backward = p.operation == core::Operation::backward;
  const int64_t keys = p.seqlen_k * (2 * p.dim + (backward ? 2 : 1) * p.value_dim);
  const int64_t queries = backward ? rows * (6 * p.dim + 2 * p.value_dim) : 0;
  // Of a very short head most is what its arrays are rounded up to: a million of them at a time would take a gigabyte.
  const int64_t rounding = backward ? 4096 : 1024;
  return (keys + queries) * element(p) + rounding;
}

}  // namespace

Schedule make_schedule(const core::Problem& p, const core::Plan& plan) {
  Schedule s;
  s.heads = p.batch * p.heads_kv;
  s.rows = p.seqlen_q * p.group();
  s.packed_heads = std::clamp<int64_t>(kPackedBytes / packed_head_bytes(p, s.rows), 1, std::max<int64_t>(s.heads, 1));
  s.block_rows = plan.block_rows;
  s.shape.dim = p.dim;
  s.shape.value_dim = p.value_dim;
  s.shape.panel = width(p);
  s.shape.direct_panel = panel_widths().f64;
  s.shape.panels = plan.block_rows / s.shape.panel;
  s.shape.weight_rows = plan.cached_weights ? panel_keys(p) : 0;
  s.shape.direct = solves(p) && p.solver != Solver::cg;
  return s;
}

std::string refuse(const core::Problem& p, const core::Machine&) {
  if (p.dim > kMaxChannels) return core::cat("head dimension ", p.dim, " is above ", kMaxChannels);
  if (p.value_dim > kMaxChannels) return core::cat("value dimension ", p.value_dim, " is above ", kMaxChannels);
  if (p.weights == Weights::cached && cached_bytes(p, 1, 1) > p.cached_weights_limit) {
    return core::cat("cached weights need at least ", cached_bytes(p, 1, 1), " bytes, cached_weights_limit is ",
                     p.cached_weights_limit);
  }
  return {};
}

namespace {

// A plan whose decisions are made, with the memory they take.
core::Plan measured(const core::Problem& p, core::Plan plan, int64_t panels) {
  plan.block_rows = static_cast<int>(panels * width(p));
  plan.block_keys = static_cast<int>(kTile);
  plan.solver = p.solver;
  const Schedule schedule = make_schedule(p, plan);
  plan.workspace_bytes = 0;
  if (!p.cache || !only_decodes(p)) {  // without a cache it may be asked to save
    plan.workspace_bytes = p.dtype == DType::f64 ? Layout<double>().take(nullptr, p, plan, schedule)
                                                 : Layout<float>().take(nullptr, p, plan, schedule);
  }
  if (may_decode(p)) plan.workspace_bytes = std::max(plan.workspace_bytes, decode_workspace(p, plan.workers));
  return plan;
}

core::Plan planned(const core::Problem& p, int threads) {
  core::Plan plan;
  const int64_t lanes = width(p);
  const int64_t rows = p.seqlen_q * p.group();
  const int64_t heads = p.batch * p.heads_kv;
  const auto blocks = [&](int64_t panels) { return heads * ((rows + panels * lanes - 1) / (panels * lanes)); };
  const double work = static_cast<double>(p.rows()) * static_cast<double>(std::min(p.seqlen_k, panel_keys(p))) *
                      static_cast<double>(p.dim + p.value_dim);
  plan.workers = work < kWorthThreads ? 1 : static_cast<int>(std::clamp<int64_t>(blocks(1), 1, std::max(1, threads)));
  if (may_decode(p) && work * decoding_factor(p) >= kWorthThreads) plan.workers = std::max(1, threads);
  // Panels that share a walk over the keys save memory traffic; several blocks a thread even out the load.
  int64_t panels = kMaxPanels;
  while (panels > 1 && (blocks(panels) < 4 * plan.workers || panels * lanes / 2 >= rows)) panels /= 2;
  plan.cached_weights = p.weights != Weights::recompute;
  if (plan.cached_weights) {
    while (panels > 1 && cached_bytes(p, panels, plan.workers) > cached_limit(p)) panels /= 2;
    while (p.weights == Weights::cached && plan.workers > 1 && cached_bytes(p, panels, plan.workers) > cached_limit(p))
      --plan.workers;
    plan.cached_weights = cached_bytes(p, panels, plan.workers) <= cached_limit(p);
  }
  return measured(p, plan, panels);
}

}  // namespace

// A workspace may have been asked for when the library had another number of threads. Then that number's plan is taken,
// the nearest that fits, with no more threads than there are now.
core::Plan make_plan(const core::Problem& p, const core::Machine& machine) {
  const auto fits = [&](const core::Plan& plan) { return plan.workspace_bytes <= machine.workspace_bytes; };
  const core::Plan wanted = planned(p, machine.threads);
  if (fits(wanted)) return wanted;
  for (int threads = machine.threads - 1; threads > 0; --threads) {
    if (const core::Plan fewer = planned(p, threads); fits(fewer)) return fewer;
  }
  for (int threads = machine.threads + 1; threads <= kMaxThreads; ++threads) {
    core::Plan more = planned(p, threads);
    if (!fits(more)) continue;
    more.workers = std::min(more.workers, wanted.workers);
    return measured(p, more, more.block_rows / width(p));
  }
  return wanted;
}

core::Notes notes(const core::Problem& p, const core::Machine& machine, const core::Plan&) {
  core::Notes notes{{"simd", machine.simd}, {"panel", core::cat(width(p), " rows")}};
  if (may_decode(p)) {
    notes.emplace_back(
        "sequences of few rows",
        core::cat("up to ", kMostDecodedRows, " rows a kv head decode", p.cache ? "" : " where nothing is saved",
                  p.given_x() ? "" : ", solved directly", "; their keys are split over the threads"));
  }
  if (solves(p) && p.solver == Solver::automatic && (!p.cache || !only_decodes(p))) {
    const bool direct = direct_first(p.dim, p.seqlen_k, p.tolerance, p.dtype == DType::f64);
    notes.emplace_back(
        "rows are solved",
        direct ? "directly"
               : core::cat("by conjugate gradients, directly after ",
                           direct_cost_in_iterations(p.dim, p.seqlen_k, p.dtype == DType::f64), " iterations"));
  }
  return notes;
}

}  // namespace lla::cpu
