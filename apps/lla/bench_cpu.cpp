// `lla bench ... --device cpu`: executed products per second over what a BLAS reaches, time over a naive
// implementation, growth.
#include <algorithm>
#include <stdexcept>

#include <fmt/core.h>

#include "bench.hpp"
#include "bench/blas.hpp"
#include "bench/cpu_bench.hpp"
#include "core/text.hpp"

namespace lla::app {
namespace {

std::string refuse(const BenchOptions& o) {
  if (o.what == BenchWhat::decode) return {};
  if (o.given_x || o.weights != Weights::automatic || !o.implementation.empty()) {
    return "--given-x, --weights and --implementation are for --device cuda";
  }
  if (o.table) return "--table is for --device cuda";
  return {};
}

bench::CpuCase make_case(const BenchOptions& o, int64_t dim, int64_t length) {
  return {case_of(o, DType::f32, dim, length), o.threads};
}

void require(const Status& status) {
  if (!status) throw std::runtime_error(status.message());
}

std::string mebibytes(size_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20)); }

void add_row(const bench::CpuCase& c, const bench::CpuResult& r, BenchReport& report) {
  const auto or_dash = [](double x, const char* format) {
    return x > 0 ? fmt::format(fmt::runtime(format), x) : std::string("-");
  };
  report.rows.push_back({core::name(c.dtype), fmt::format("{}", c.dim), fmt::format("{}", c.length),
                         fmt::format("{}", r.threads), fmt::format("{:.3f}", 1e3 * r.seconds),
                         fmt::format("{:.1f}", r.gflops), or_dash(r.blas_gflops, "{:.1f}"), or_dash(r.ratio, "{:.2f}"),
                         c.what == bench::What::cg ? "-" : fmt::format("{:.1f}", r.iterations),
                         r.cached_weights ? "cached" : "recomputed", fmt::format("{:.0f}", 100 * r.direct_rows),
                         or_dash(r.naive_seconds / r.seconds, "{:.0f}x"), mebibytes(r.workspace_bytes)});
  report.records.push_back({{"dtype", core::name(c.dtype)},
                            {"dim", c.dim},
                            {"length", c.length},
                            {"batch", c.batch},
                            {"heads", c.heads},
                            {"threads", r.threads},
                            {"seconds", r.seconds},
                            {"repeats", r.repeats},
                            {"gflops", r.gflops},
                            {"blas_gflops", r.blas_gflops},
                            {"ratio", r.ratio},
                            {"iterations", r.iterations},
                            {"cached_weights", r.cached_weights},
                            {"direct_rows", r.direct_rows},
                            {"naive_seconds", r.naive_seconds},
                            {"workspace_bytes", r.workspace_bytes}});
}

void run(const BenchOptions& o, BenchReport& report, const std::function<void(double)>& progress) {
  if (o.what == BenchWhat::decode) {
    const int before = lla_get_num_threads();
    if (o.threads > 0) lla_set_num_threads(o.threads);
    run_decode(o, core::Device::cpu, report, progress);
    lla_set_num_threads(before);
    return;
  }
  const std::vector<int64_t> dims = dims_of(o), lengths = lengths_of(o);
  report.columns = {{"dtype", ""},
                    {"D", ""},
                    {"n", ""},
                    {"threads", ""},
                    {"time", "ms"},
                    {"products", "GFLOP/s"},
                    {"sgemm", "GFLOP/s"},
                    {"ratio", ""},
                    {"iterations", ""},
                    {"weights", ""},
                    {"direct", "% of rows"},
                    {"naive", "time / ours"},
                    {"workspace", "MiB"}};
  // How time and memory grow is only worth fitting over a few lengths; the default is a factor of eight.
  const std::vector<int64_t> growth_lengths = {512, 1024, 2048, 4096};
  const bool fit_growth = o.lengths.empty() && o.what != BenchWhat::cg;
  const double steps = static_cast<double>(dims.size() * (lengths.size() + (fit_growth ? 1 : 0)));
  double done = 0;
  const auto step = [&](double part) { progress((done + part) / steps); };
  for (int64_t dim : dims) {
    for (int64_t length : lengths) {
      const bench::CpuCase c = make_case(o, dim, length);
      bench::CpuResult result;
      require(bench::measure_cpu(c, result, step));
      add_row(c, result, report);
      done += 1;
    }
  }
  for (int64_t dim : dims) {
    if (!fit_growth) break;
    bench::Growth growth;
    require(bench::measure_growth(make_case(o, dim, growth_lengths.front()), growth_lengths, growth, step));
    report.notes.push_back(fmt::format("D = {}: from n = {} to {} time grows as n^{:.2f}, workspace as n^{:.2f}", dim,
                                       growth_lengths.front(), growth_lengths.back(), growth.time_exponent,
                                       growth.memory_exponent));
    done += 1;
  }
  report.notes.insert(
      report.notes.begin(),
      "products: FLOPs of the products over (query, visible key) pairs that were executed, per second, best of the "
      "repeats;\n"
      "with cached weights an iteration executes 2 products, otherwise 3.");
  report.notes.push_back(
      bench::have_blas()
          ? fmt::format("sgemm: 2048^3 in the same run by OpenBLAS, which has chosen its kernels for {} here\n"
                        "(OPENBLAS_CORETYPE chooses others; a processor it does not know gets older ones).",
                        bench::blas_kernels())
          : "This build has no BLAS to compare with (libopenblas-dev was not found).");
}

}  // namespace

const BenchDevice cpu_bench = {"cpu", refuse, run};

}  // namespace lla::app
