// `lla bench decode`: new queries of every sequence over a key-value cache, contiguous or paged. One sequence is
// checked against fp64 before anything is timed; on a GPU the call is a graph that is replayed.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>

#include <fmt/core.h>

#include "bench.hpp"
#include "bench/device_memory.hpp"
#include "core/convert.hpp"
#include "core/text.hpp"
#include "data/data.hpp"
#if LLA_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lla::app {
namespace {

using bench::DeviceMemory;
using bench::synchronize;
using core::Device;

void require(const Status& status) {
  if (!status) throw std::runtime_error(status.message());
}

// Normals in the case's type, repeated as often as a tensor needs: a cache of gigabytes is filled in no time. The
// period is odd, so that rows and heads differ.
class Normals {
 public:
  Normals(DType dtype, uint64_t stream, double scale) : dtype_(dtype), bytes_(kPeriod * size()) {
    for (size_t i = 0; i < kPeriod; ++i)
      core::store(bytes_.data(), dtype, static_cast<int64_t>(i), scale * data::normal(1, stream, i));
  }
  double at(int64_t index) const { return core::load(bytes_.data(), dtype_, index % static_cast<int64_t>(kPeriod)); }
  DeviceMemory fill(Device device, int64_t elements) const {
    DeviceMemory memory(device, static_cast<size_t>(elements) * size());
    const size_t all = static_cast<size_t>(elements) * size();
    for (size_t done = 0; done < all; done += bytes_.size())
      memory.upload(done, bytes_.data(), std::min(bytes_.size(), all - done));
    return memory;
  }

 private:
  static constexpr size_t kPeriod = 1'000'003;
  size_t size() const { return static_cast<size_t>(core::size_of(dtype_)); }
  DType dtype_;
  std::vector<std::byte> bytes_;
};

struct DecodeCase {
  Device device;
  DType dtype;
  int64_t batch, heads_kv, group, length, dim, page_size, queries;
  double ridge, tolerance, seconds;
  Solver solver;
  bool given_x, head_major, batch_invariant;
  std::string implementation;

  int64_t heads_q() const { return heads_kv * group; }
  int64_t cache_elements() const { return batch * length * heads_kv * dim; }
};

struct DecodeResult {
  std::string implementation;
  double median = 0, fastest = 0;
  int repeats = 0;
  double error = 0;
  size_t workspace_bytes = 0;
};

// A call with its memory.
class DecodeCall {
 public:
  explicit DecodeCall(const DecodeCase& c)
      : case_(c),
        keys_(c.dtype, 1, 1),
        values_(c.dtype, 2, 1),
        queries_(c.dtype, 3, 1),
        given_(c.dtype, 4, 0.3),
        pages_per_sequence_(c.page_size > 0 ? (c.length + c.page_size - 1) / c.page_size : 0),
        q_(queries_.fill(c.device, rows() * c.dim)),
        k_(keys_.fill(c.device, slots() * c.heads_kv * c.dim)),
        v_(values_.fill(c.device, slots() * c.heads_kv * c.dim)),
        x_(given_.fill(c.device, c.given_x ? rows() * c.dim : 1)),
        o_(c.device, static_cast<size_t>(rows() * c.dim * core::size_of(out()))),
        ridge_(c.device, 8),
        lengths_(c.device, static_cast<size_t>(c.batch) * 4),
        table_(c.device, static_cast<size_t>(std::max<int64_t>(c.batch * pages_per_sequence_, 1)) * 4) {
    const int device = c.device == Device::cuda ? 0 : -1;
    const DType wide = c.dtype == DType::f64 ? DType::f64 : DType::f32;
    std::byte ridge[8];
    core::store(ridge, wide, 0, c.ridge);
    ridge_.upload(ridge);
    const std::vector<int32_t> lengths(static_cast<size_t>(c.batch), static_cast<int32_t>(c.length));
    lengths_.upload(lengths.data());
    order_.resize(static_cast<size_t>(c.batch * pages_per_sequence_));
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), std::mt19937(1));
    if (!order_.empty()) table_.upload(order_.data());

    args_.q = dense(q_.data(), c.dtype, {c.batch, c.queries, c.heads_q(), c.dim}, device);
    args_.k = cache_view(k_.data(), device);
    args_.v = cache_view(v_.data(), device);
    if (c.given_x) {
      args_.x = dense(x_.data(), c.dtype, {c.batch, c.queries, c.heads_q(), c.dim}, device);
    } else {
      args_.ridge = scalar(ridge_.data(), wide, device);
    }
    args_.o = dense(o_.data(), out(), {c.batch, c.queries, c.heads_q(), c.dim}, device);
    args_.seqlens_k = dense(lengths_.data(), DType::i32, {c.batch}, device);
    if (c.page_size > 0) args_.page_table = dense(table_.data(), DType::i32, {c.batch, pages_per_sequence_}, device);
    args_.max_seqlen_k = c.length;
    args_.options.tolerance = c.tolerance;
    args_.options.solver = static_cast<int32_t>(c.solver);
    args_.options.batch_invariant = c.batch_invariant;
    if (!case_.implementation.empty()) args_.options.implementation = case_.implementation.c_str();
    require(query(args_, sizes_));
    workspace_.emplace(c.device, std::max<size_t>(sizes_.workspace_bytes, 1));
    args_.workspace = workspace_->data();
    args_.workspace_bytes = sizes_.workspace_bytes;
  }

  void run(void* stream) {
    args_.stream = stream;
    require(forward(args_));
  }

  size_t workspace_bytes() const { return sizes_.workspace_bytes; }
  std::string implementation() const {
    char text[4096];
    require(Status::last(lla_forward_plan(&args_, text, sizeof text)));
    const std::string plan = text, key = "implementation: ";
    return plan.substr(key.size(), plan.find('\n') - key.size());
  }

  // Of the last sequence's first head against the reference, over what the tiles of normals hold.
  double error() const {
    const DecodeCase& c = case_;
    const int64_t b = c.batch - 1;
    std::vector<double> q, k, v, x, want(static_cast<size_t>(c.queries * c.dim));
    for (int64_t i = 0; i < c.queries; ++i) {
      for (int64_t d = 0; d < c.dim; ++d) {
        const int64_t at = ((b * c.queries + i) * c.heads_q()) * c.dim + d;
        q.push_back(queries_.at(at));
        x.push_back(given_.at(at));
      }
    }
    for (int64_t j = 0; j < c.length; ++j) {
      const int64_t page = c.page_size > 0 ? order_[static_cast<size_t>(b * pages_per_sequence_ + j / c.page_size)] : b;
      const int64_t at = page * args_.k.stride[0] + (c.page_size > 0 ? j % c.page_size : j) * args_.k.stride[1];
      for (int64_t d = 0; d < c.dim; ++d) {
        k.push_back(keys_.at(at + d));
        v.push_back(values_.at(at + d));
      }
    }
    ForwardArgs args;
    args.q = dense(q.data(), DType::f64, {1, c.queries, 1, c.dim});
    args.k = dense(k.data(), DType::f64, {1, c.length, 1, c.dim});
    args.v = dense(v.data(), DType::f64, {1, c.length, 1, c.dim});
    args.o = dense(want.data(), DType::f64, {1, c.queries, 1, c.dim});
    if (c.given_x) {
      args.x = dense(x.data(), DType::f64, {1, c.queries, 1, c.dim});
    } else {
      args.ridge = scalar(&c.ridge, DType::f64);
    }
    args.options.implementation = "reference";
    require(forward(args));
    std::vector<std::byte> got(o_.size());
    o_.download(got.data());
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < c.queries; ++i) {
      for (int64_t d = 0; d < c.dim; ++d) {
        const double w = want[static_cast<size_t>(i * c.dim + d)];
        const double g = core::load(got.data(), out(), ((b * c.queries + i) * c.heads_q()) * c.dim + d);
        difference += (g - w) * (g - w);
        norm += w * w;
      }
    }
    return std::sqrt(difference / norm);
  }

 private:
  int64_t rows() const { return case_.batch * case_.queries * case_.heads_q(); }
  int64_t slots() const {
    return case_.page_size > 0 ? case_.batch * pages_per_sequence_ * case_.page_size : case_.batch * case_.length;
  }
  DType out() const { return case_.dtype == DType::f64 ? DType::f64 : DType::f32; }
  Tensor cache_view(const void* data, int device) const {
    const int64_t first = case_.page_size > 0 ? case_.batch * pages_per_sequence_ : case_.batch;
    const int64_t second = case_.page_size > 0 ? case_.page_size : case_.length;
    Tensor t = dense(data, case_.dtype, {first, second, case_.heads_kv, case_.dim}, device);
    if (case_.head_major) t.stride[1] = case_.dim, t.stride[2] = second * case_.dim;
    return t;
  }

  DecodeCase case_;
  Normals keys_, values_, queries_, given_;
  int64_t pages_per_sequence_;
  DeviceMemory q_, k_, v_, x_, o_, ridge_, lengths_, table_;
  std::optional<DeviceMemory> workspace_;
  std::vector<int32_t> order_;  // pages of the sequences, one after the other
  ForwardArgs args_;
  ForwardSizes sizes_;
};

constexpr int kMinRepeats = 10;

std::vector<double> time_cpu(DecodeCall& call, double seconds, const std::function<void(double)>& progress) {
  std::vector<double> times;
  double spent = 0;
  while (static_cast<int>(times.size()) < kMinRepeats || spent < seconds) {
    const auto start = std::chrono::steady_clock::now();
    call.run(nullptr);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    spent += times.back();
    progress(std::min({spent / seconds, static_cast<double>(times.size()) / kMinRepeats, 1.0}));
  }
  return times;
}

#if LLA_HAVE_CUDA
void require_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(fmt::format("CUDA: {}", cudaGetErrorString(error)));
}

std::vector<double> time_cuda(DecodeCall& call, double seconds, const std::function<void(double)>& progress) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t before, after;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  call.run(stream);
  require_cuda(cudaStreamEndCapture(stream, &graph));
  require_cuda(cudaGraphInstantiate(&replay, graph, 0));
  require_cuda(cudaEventCreate(&before));
  require_cuda(cudaEventCreate(&after));
  std::vector<double> times;
  double spent = 0;
  for (int i = -3; static_cast<int>(times.size()) < kMinRepeats || spent < seconds; ++i) {
    require_cuda(cudaEventRecord(before, stream));
    require_cuda(cudaGraphLaunch(replay, stream));
    require_cuda(cudaEventRecord(after, stream));
    require_cuda(cudaEventSynchronize(after));
    float milliseconds = 0;
    require_cuda(cudaEventElapsedTime(&milliseconds, before, after));
    if (i < 0) continue;  // the first ones warm up
    times.push_back(1e-3 * milliseconds);
    spent += times.back();
    progress(std::min({spent / seconds, static_cast<double>(times.size()) / kMinRepeats, 1.0}));
  }
  cudaEventDestroy(after);
  cudaEventDestroy(before);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return times;
}
#endif

DecodeResult measure(const DecodeCase& c, const std::function<void(double)>& progress) {
  DecodeCall call(c);
  call.run(nullptr);
  synchronize(c.device);
  DecodeResult result;
  result.implementation = call.implementation();
  result.workspace_bytes = call.workspace_bytes();
  result.error = call.error();
  constexpr double kMost = 1e-2;  // beyond it something is wrong, not inaccurate
  if (!(result.error < kMost)) {
    throw std::runtime_error(fmt::format("D = {}, n = {}: {} is {:.1e} off the fp64 reference and was not timed", c.dim,
                                         c.length, result.implementation, result.error));
  }
#if LLA_HAVE_CUDA
  std::vector<double> times =
      c.device == Device::cuda ? time_cuda(call, c.seconds, progress) : time_cpu(call, c.seconds, progress);
#else
  std::vector<double> times = time_cpu(call, c.seconds, progress);
#endif
  std::sort(times.begin(), times.end());
  result.repeats = static_cast<int>(times.size());
  result.median = times[times.size() / 2];
  result.fastest = times.front();
  return result;
}

}  // namespace

void run_decode(const BenchOptions& o, core::Device device, BenchReport& report,
                const std::function<void(double)>& progress) {
  const std::vector<int64_t> dims = dims_of(o), lengths = lengths_of(o);
  report.columns = {{"implementation", ""}, {"dtype", ""},     {"D", ""},     {"B", ""},           {"Hkv", ""},
                    {"group", ""},          {"Lq", ""},        {"n", ""},     {"pages of", ""},    {"median", "us"},
                    {"fastest", "us"},      {"cache", "GB/s"}, {"error", ""}, {"workspace", "MiB"}};
  const bool cuda = device == Device::cuda;
  double done = 0;
  const double steps = static_cast<double>(dims.size() * lengths.size());
  for (const int64_t dim : dims) {
    for (const int64_t length : lengths) {
      if (length < o.queries) {
        throw std::runtime_error(
            fmt::format("n = {} is shorter than the {} queries, which are its last", length, o.queries));
      }
      const DecodeCase c{.device = device,
                         .dtype = o.dtype != DType::none ? o.dtype
                                  : cuda                 ? DType::bf16
                                                         : DType::f32,
                         .batch = o.batch,
                         .heads_kv = o.heads,
                         .group = o.group,
                         .length = length,
                         .dim = dim,
                         .page_size = o.page_size,
                         .queries = o.queries,
                         .ridge = o.ridge,
                         .tolerance = o.tolerance,
                         .seconds = o.seconds > 0 ? o.seconds : 1,
                         .solver = o.solver,
                         .given_x = o.given_x,
                         .head_major = o.head_major,
                         .batch_invariant = o.batch_invariant,
                         .implementation = o.implementation};
      const DecodeResult r = measure(c, [&](double part) { progress((done + part) / steps); });
      const double bytes = 2.0 * static_cast<double>(c.cache_elements() * core::size_of(c.dtype));
      report.rows.push_back({r.implementation, core::name(c.dtype), fmt::format("{}", dim), fmt::format("{}", c.batch),
                             fmt::format("{}", c.heads_kv), fmt::format("{}", c.group), fmt::format("{}", c.queries),
                             fmt::format("{}", length), c.page_size > 0 ? fmt::format("{}", c.page_size) : "-",
                             fmt::format("{:.1f}", 1e6 * r.median), fmt::format("{:.1f}", 1e6 * r.fastest),
                             fmt::format("{:.1f}", 1e-9 * bytes / r.median), fmt::format("{:.1e}", r.error),
                             fmt::format("{:.1f}", static_cast<double>(r.workspace_bytes) / (1 << 20))});
      report.records.push_back({{"implementation", r.implementation},
                                {"dtype", core::name(c.dtype)},
                                {"dim", dim},
                                {"batch", c.batch},
                                {"heads_kv", c.heads_kv},
                                {"group", c.group},
                                {"queries", c.queries},
                                {"length", length},
                                {"page_size", c.page_size},
                                {"given_x", c.given_x},
                                {"head_major", c.head_major},
                                {"batch_invariant", c.batch_invariant},
                                {"seconds", r.median},
                                {"fastest", r.fastest},
                                {"repeats", r.repeats},
                                {"error", r.error},
                                {"workspace_bytes", r.workspace_bytes}});
      progress(++done / steps);
    }
  }
  report.notes = {
      fmt::format("median: of calls of their own{}. cache: bytes of keys and values over that time. error: the "
                  "last sequence's first head against\nfp64, outputs in fp32.",
                  cuda ? ", replayed as a graph" : "")};
}

}  // namespace lla::app
