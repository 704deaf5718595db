// `lla bench forward|backward --device cuda --table`: the tables of docs/benchmarks in one go. A case whose result is
// not accurate has no times in it.
#include <fmt/core.h>

#include "bench_cuda.hpp"

namespace lla::app {
namespace {

using bench::CudaCase;
using bench::CudaResult;

// What is aimed at on an H200; 0: nothing in particular.
struct Targets {
  double recompute_us, cached_us;  // one iteration
  double forward_ms, given_x_ms;
  double backward_ms, backward_given_x_ms;
};
struct Shape {
  int64_t dim, batch, heads, length;
  Targets targets;
};
constexpr Shape kShapes[] = {
    {128, 4, 8, 4096, {310, 220, 3.2, 0.55, 5.6, 2.3}}, {64, 4, 8, 4096, {200, 145, 2.0, 0, 3.4, 0}},
    {128, 1, 8, 16384, {0, 0, 11, 0, 21, 0}},           {64, 1, 8, 16384, {}},
    {128, 8, 8, 1024, {0, 0, 0.75, 0, 0, 0}},           {64, 8, 8, 1024, {}}};

struct Variant {
  Weights weights;
  bool given_x;
  const char* name;
};
constexpr Variant kForward[] = {{Weights::recompute, false, "recompute"},
                                {Weights::cached, false, "cached"},
                                {Weights::automatic, true, "x given"}};
constexpr Variant kBackward[] = {{Weights::automatic, false, ""}, {Weights::automatic, true, "x given"}};

std::string number(double x, int digits) { return x > 0 ? fmt::format("{:.{}f}", x, digits) : ""; }
std::string milliseconds(double seconds) { return number(1e3 * seconds, seconds < 1e-3 ? 3 : 2); }
std::string name(const CudaCase& c) { return fmt::format("{}, {}, {}", c.dim, c.batch * c.heads, c.length); }
std::string error(const CudaResult& r) {
  return r.worst_output.empty() ? "" : fmt::format("{:.1e} ({})", r.error, r.worst_output);
}

std::vector<std::string> forward_row(const CudaCase& c, const CudaResult& r, const Variant& v, const Targets& t) {
  const bool h200 = r.device.find("H200") != std::string::npos;
  const double floor = h200 && c.with_iteration ? bench::h200_iteration_floor(c, v.weights == Weights::cached) : 0;
  return {name(c),
          v.name,
          milliseconds(r.seconds),
          v.given_x ? "" : number(r.block_iterations, 2),
          number(1e6 * r.iteration_seconds, 0),
          number(r.iteration_tflops, 0),
          number(1e6 * floor, 0),
          error(r),
          number(v.given_x                      ? 0
                 : v.weights == Weights::cached ? t.cached_us
                                                : t.recompute_us,
                 0),
          number(v.given_x ? t.given_x_ms : t.forward_ms, 2)};
}

std::vector<std::string> backward_row(const CudaCase& c, const CudaResult& r, const Variant& v, const Targets& t) {
  return {name(c) + (v.given_x ? ", x given" : ""),
          milliseconds(r.seconds),
          v.given_x ? "" : number(r.block_iterations, 2),
          number(r.tflops, 0),
          error(r),
          number(static_cast<double>(r.workspace_bytes) / (1 << 20), 0),
          number(v.given_x ? t.backward_given_x_ms : t.backward_ms, 1)};
}

}  // namespace

void run_cuda_table(const BenchOptions& o, BenchReport& report, const std::function<void(double)>& progress) {
  const bool backward = o.what == BenchWhat::backward;
  if (backward) {
    report.columns = {{"D, B·H, n", ""},      {"ms", ""},    {"iterations", ""},
                      {"useful TFLOP/s", ""}, {"error", ""}, {"workspace MiB", ""},
                      {"target ms", ""}};
    report.notes = {
        "ms: median of event-timed runs, each after the L2 cache was overwritten, every launch included. useful: "
        "12 + 3 T products over visible\npairs (12 + 2 T with cached weights, 8 with x given)."};
  } else {
    report.columns = {{"D, B·H, n", ""},           {"weights", ""},      {"forward", "ms"}, {"iterations", ""},
                      {"one iteration", "µs"},     {"TFLOP/s", "in it"}, {"floor", "µs"},   {"error", ""},
                      {"target: iteration", "µs"}, {"forward", "ms"}};
    report.notes = {
        "forward: median of event-timed runs, each after the L2 cache was overwritten, the pre-pass included. One "
        "iteration: runs of 12 minus runs\nof 4, over 8. floor: 3 products at 790 TFLOP/s recomputing; 2, or reading "
        "2 bytes a pair at 4.3 TB/s, with cached weights (an H200)."};
  }
  report.notes.emplace_back(
      "iterations: of the row that takes most in each block of 128, averaged over blocks by the keys they see. error: "
      "one head (shortened to\n2048, backward 1024) against fp64, fp32 outputs; eight rows of the timed run are "
      "checked, too.");
  const std::vector<Variant> variants = backward ? std::vector<Variant>(std::begin(kBackward), std::end(kBackward))
                                                 : std::vector<Variant>(std::begin(kForward), std::end(kForward));
  bench::CudaBench bench;
  const double steps = static_cast<double>(std::size(kShapes) * variants.size());
  double done = 0;
  for (const Shape& shape : kShapes) {
    for (const Variant& variant : variants) {
      CudaCase c(case_of(o, DType::bf16, shape.dim, shape.length));
      c.batch = shape.batch;
      c.heads = shape.heads;
      c.implementation = o.implementation;
      c.weights = variant.weights;
      c.given_x = variant.given_x;
      c.with_iteration = !backward && !variant.given_x;
      if (o.seconds == 0) c.seconds = 0.1;
      CudaResult result;
      const Status status = bench.measure(c, result, [&](double part) { progress((done + part) / steps); });
      if (!status)
        report.failures.push_back(
            fmt::format("{}{}{}: {}", name(c), *variant.name ? ", " : "", variant.name, status.message()));
      report.rows.push_back(backward ? backward_row(c, result, variant, shape.targets)
                                     : forward_row(c, result, variant, shape.targets));
      if (status) report.records.push_back(cuda_record(c, result));
      progress(++done / steps);
    }
  }
}

}  // namespace lla::app
