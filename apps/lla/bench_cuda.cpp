// `lla bench ... --device cuda`: median time with the L2 cache flushed, iterations executed, useful TFLOP/s. A case
// whose result is not accurate, or not the same after all timed runs as after the first, gets no time: the command
// fails and says why.
#include <stdexcept>

#include <fmt/core.h>

#include "bench_cuda.hpp"
#include "core/text.hpp"
#include "plan/machine.hpp"

namespace lla::app {
namespace {

std::string refuse(const BenchOptions& o) {
  if (o.what == BenchWhat::cg && o.given_x) return "with x given there is nothing to iterate";
  if (o.threads != 0) return "--threads is for the CPU";
  if (o.table && o.what == BenchWhat::cg) return "bench forward --table has the times of one iteration, too";
  const core::CudaDevice device = core::this_machine(0).cuda;
  return device.present ? "" : "no CUDA device: " + device.absent_reason;
}

bench::CudaCase make_case(const BenchOptions& o, int64_t dim, int64_t length) {
  bench::CudaCase c(case_of(o, DType::bf16, dim, length));
  c.implementation = o.implementation;
  c.given_x = o.given_x;
  c.weights = o.weights;
  return c;
}

void add_row(const bench::CudaCase& c, const bench::CudaResult& r, BenchReport& report) {
  const bool solves = !c.given_x && c.what != bench::What::cg;
  report.rows.push_back(
      {r.implementation, core::name(c.dtype), fmt::format("{}", c.dim), fmt::format("{}", c.batch * c.heads),
       fmt::format("{}", c.length), fmt::format("{:.3f}", 1e3 * r.seconds), fmt::format("{:.3f}", 1e3 * r.fastest),
       fmt::format("{:.1f}", r.tflops), solves ? fmt::format("{:.2f}", r.iterations) : "-",
       solves ? fmt::format("{}", r.most_iterations) : "-", r.cached_weights ? "cached" : "recomputed",
       fmt::format("{:.1f}", 100 * r.direct_rows), fmt::format("{:.1e} {}", r.error, r.worst_output),
       fmt::format("{:.1f}", static_cast<double>(r.workspace_bytes) / (1 << 20))});
  report.records.push_back(cuda_record(c, r));
}

void run(const BenchOptions& o, BenchReport& report, const std::function<void(double)>& progress) {
  if (o.what == BenchWhat::decode) return run_decode(o, core::Device::cuda, report, progress);
  if (o.table) return run_cuda_table(o, report, progress);
  const std::vector<int64_t> dims = o.dims.empty() ? std::vector<int64_t>{64, 128} : o.dims;
  const std::vector<int64_t> lengths = o.lengths.empty() ? std::vector<int64_t>{1024, 4096} : o.lengths;
  report.columns = {{"implementation", ""},
                    {"dtype", ""},
                    {"D", ""},
                    {"B H", ""},
                    {"n", ""},
                    {"median", "ms"},
                    {"fastest", "ms"},
                    {"useful", "TFLOP/s"},
                    {"iterations", "mean"},
                    {"", "most"},
                    {"weights", ""},
                    {"direct", "% of rows"},
                    {"error", "worst"},
                    {"workspace", "MiB"}};
  bench::CudaBench bench;
  double done = 0;
  const double steps = static_cast<double>(dims.size() * lengths.size());
  for (int64_t dim : dims) {
    for (int64_t length : lengths) {
      const bench::CudaCase c = make_case(o, dim, length);
      bench::CudaResult result;
      const Status status = bench.measure(c, result, [&](double part) { progress((done + part) / steps); });
      if (!status) throw std::runtime_error(fmt::format("D = {}, n = {}: {}", dim, length, status.message()));
      add_row(c, result, report);
      progress(++done / steps);
    }
  }
  report.notes = {
      "median: event-timed runs, each after the L2 cache was overwritten; of one iteration for cg (runs of 12 minus "
      "runs of 4, over 8).\n"
      "useful: products over visible pairs per second, 5 + 3 T forward and 12 + 3 T backward for T iterations (4 + 2 T "
      "and 12 + 2 T with\n"
      "cached weights), 4 and 8 with x given. iterations: mean over rows, weighted by the keys they see. error: one "
      "head "
      "against\nfp64, fp32 outputs."};
}

}  // namespace

nlohmann::ordered_json cuda_record(const bench::CudaCase& c, const bench::CudaResult& r) {
  return {{"gpu", r.device},
          {"implementation", r.implementation},
          {"dtype", core::name(c.dtype)},
          {"dim", c.dim},
          {"batch", c.batch},
          {"heads", c.heads},
          {"length", c.length},
          {"given_x", c.given_x},
          {"seconds", r.seconds},
          {"fastest", r.fastest},
          {"slowest", r.slowest},
          {"repeats", r.repeats},
          {"tflops", r.tflops},
          {"iterations", r.iterations},
          {"block_iterations", r.block_iterations},
          {"most_iterations", r.most_iterations},
          {"iteration_seconds", r.iteration_seconds},
          {"iteration_tflops", r.iteration_tflops},
          {"cached_weights", r.cached_weights},
          {"direct_rows", r.direct_rows},
          {"error", r.error},
          {"worst_output", r.worst_output},
          {"gate", r.gate},
          {"workspace_bytes", r.workspace_bytes},
          {"plan", r.plan}};
}

const BenchDevice cuda_bench = {"cuda", refuse, run};

}  // namespace lla::app
