#include "memory/run.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <memory>

#include <fmt/core.h>

#include "common/random.hpp"
#include "common/statistics.hpp"
#include "lla/lla.hpp"
#include "memory/device_call.hpp"
#include "memory/naive.hpp"
#include "memory/peak.hpp"

namespace lla::experiments {
namespace {

constexpr std::array<const char*, 3> kMethods = {"naive", "blockwise", "softmax"};
constexpr int kRepeats = 4;
constexpr double kRepeatBelow = 5;  // seconds
constexpr int64_t kFitFrom = 1024;  // shorter ones are dominated by fixed costs

// Inputs and output, in memory that has been touched.
struct Heads {
  NaiveSizes size;
  std::vector<float> q, k, v, x, o;
  std::vector<int32_t> lengths;
  Heads(uint64_t seed, const NaiveSizes& s)
      : size(s),
        q(s.batch * s.queries * s.dim),
        k(s.batch * s.keys * s.dim),
        v(k.size()),
        x(q.size(), 0.0f),
        o(q.size(), 0.0f),
        lengths(s.batch, static_cast<int32_t>(s.keys)) {
    uint64_t purpose = 0;
    for (auto* t : {&q, &k, &v}) Stream(seed, s.keys, purpose++).normal(t->data(), t->size());
  }
};

// Blockwise attention on the CPU: LLA, or softmax attention, which is its infinite ridge; over a cache x = 0, which
// needs no matrix.
Cost attention(const MemoryRun& run, Heads& heads, bool softmax) {
  const float ridge = softmax ? std::numeric_limits<float>::infinity() : static_cast<float>(run.ridge);
  const auto [batch, queries, keys, d] = heads.size;
  ForwardArgs args;
  args.q = dense(heads.q.data(), DType::f32, {batch, queries, 1, d});
  args.k = dense(heads.k.data(), DType::f32, {batch, keys, 1, d});
  args.v = dense(heads.v.data(), DType::f32, {batch, keys, 1, d});
  args.o = dense(heads.o.data(), DType::f32, {batch, queries, 1, d});
  if (run.decode) args.seqlens_k = dense(heads.lengths.data(), DType::i32, {batch});
  if (run.decode && softmax) {
    args.x = dense(heads.x.data(), DType::f32, {batch, queries, 1, d});
  } else {
    args.ridge = scalar(&ridge);
  }
  const std::unique_ptr<DeviceMemory> memory = open_device(Device::cpu);
  DeviceBuffer workspace(*memory);
  const auto call = [&] {
    size_t need = 0;
    if (const Status s = workspace_bytes(args, need); !s) throw Failure(s.message());
    args.workspace = workspace.require(need);
    args.workspace_bytes = need;
    if (const Status s = forward(args); !s) throw Failure(s.message());
  };
  Cost cost = measure_cost(call);  // the first call takes the memory; the quickest of a few tells the time
  for (int i = 0; i < kRepeats && cost.seconds < kRepeatBelow; ++i)
    cost.seconds = std::min(cost.seconds, measure_cost(call).seconds);
  return cost;
}

// One line of the figure: a method with one type, dimension and batch, over the lengths.
struct Line {
  std::string method, dtype;
  int64_t d, batch;
  Json identity() const { return {{"method", method}, {"dtype", dtype}, {"d", d}, {"batch", batch}}; }
};

std::vector<Line> lines(const MemoryRun& run) {
  std::vector<Line> list;
  for (const std::string& dtype : run.dtypes) {
    for (const int d : run.dims) {
      for (const int64_t batch : run.batches) {
        for (const char* method : kMethods) list.push_back({method, dtype, d, batch});
      }
    }
  }
  return list;
}

const char* task_of(const MemoryRun& run) { return run.decode ? "memory-decode" : "memory"; }

// fits: there was room for it. ran: the call was made. peak_bytes: measured where it fits, else what it would need.
Json record_of(const MemoryRun& run, const Line& line, int64_t n) {
  Json record = {{"task", task_of(run)}, {"device", run.device == Device::cuda ? "cuda" : "cpu"}};
  record.update(line.identity());
  record.update({{"n", n}, {"fits", false}, {"ran", false}, {"seconds", nullptr}, {"peak_bytes", nullptr}});
  return record;
}

Json measure(const MemoryRun& run, const Line& line, int64_t n) {
  Json record = record_of(run, line, n);
  const bool naive = line.method == "naive";
  const NaiveSizes sizes{line.batch, run.decode ? 1 : n, n, line.d};
  if (naive && naive_bytes(sizes) > run.limit_bytes) {
    record["peak_bytes"] = naive_bytes(sizes);
    return record;
  }
  Heads heads(run.seed, sizes);
  const auto naively = [&] {
    naive_lla(sizes, 1 / std::sqrt(double(line.d)), run.ridge, heads.q.data(), heads.k.data(), heads.v.data(),
              heads.o.data(), lla_get_num_threads());
  };
  const Cost cost = naive ? measure_cost(naively) : attention(run, heads, line.method == "softmax");
  record["fits"] = record["ran"] = true;
  record["seconds"] = cost.seconds;
  record["peak_bytes"] = cost.peak_bytes;
  return record;
}

double relative(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) difference += std::pow(double(a[i]) - b[i], 2), norm += std::pow(b[i], 2.0);
  return std::sqrt(difference / norm);
}

// A line on a GPU, from the shortest length to the first that does not fit. Its calls are made as long as they are
// expected to end in time, from there on only their memory is taken.
void measure_line(const MemoryRun& run, DeviceMemory& memory, const Line& line, Results& results,
                  std::map<int64_t, std::vector<float>>& naive_heads) {
  double last_seconds = 0;
  for (const int64_t n : run.lengths) {
    const DeviceCase c{line.method, line.dtype == "bf16", line.batch, n, line.d, run.ridge, run.seed, run.decode};
    if (n == run.lengths.front()) measure_on_device(memory, c, true);  // loads the kernels, which takes memory too
    const double growth = run.decode ? 2 : 4;                          // of the time, where n doubles
    const bool wanted = growth * last_seconds <= run.limit_seconds;
    const DeviceCost cost = measure_on_device(memory, c, wanted);
    Json record = record_of(run, line, n);
    record["fits"] = cost.fits, record["ran"] = cost.ran;
    if (cost.peak_bytes > 0) record["peak_bytes"] = cost.peak_bytes;
    if (cost.ran) record["seconds"] = last_seconds = cost.seconds;
    if (!cost.ran) last_seconds *= growth;
    // The two forms of LLA are the same estimator: how far apart they came out is kept beside the naive one's cost.
    record["difference"] = nullptr;
    if (line.method == "naive" && cost.ran) naive_heads[n] = cost.head;
    if (line.method == "blockwise" && cost.ran && naive_heads.contains(n))
      record["difference"] = relative(naive_heads[n], cost.head);
    results.add(std::move(record));
    if (!cost.fits) return;
  }
}

Json exponents(const Json& records, const std::vector<Line>& list) {
  Json fits = Json::array();
  for (const Line& line : list) {
    std::vector<Measured> time, memory;
    for (const Json& r : records) {
      const int64_t n = r["n"];
      if (!Results::matches(r, line.identity()) || r["ran"] == false) continue;
      if (n < (line.method == "naive" ? 256 : kFitFrom)) continue;
      time.push_back({double(n), {r["seconds"].get<double>()}});
      memory.push_back({double(n), {std::max(1.0, r["peak_bytes"].get<double>())}});
    }
    if (time.size() < 2) continue;
    Json fit = line.identity();
    fit["memory"] = fit_exponent(memory, false).value;
    fit["time"] = fit_exponent(time, false).value;
    fit["points"] = time.size();
    fits.push_back(std::move(fit));
  }
  return fits;
}

}  // namespace

double default_memory_limit() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("MemAvailable:", 0) == 0) return 512 * std::stod(line.substr(13));
  }
  return double(int64_t{1} << 30);
}

bool run(const MemoryRun& request, const Progress& progress) {
  const bool cuda = request.device == Device::cuda;
  const auto only_one = [](const auto& list, const auto& value) { return list.size() == 1 && list.front() == value; };
  const bool batched = !only_one(request.batches, int64_t{1});
  if (!cuda && ((batched && !request.decode) || !only_one(request.dtypes, std::string("f32")))) {
    throw Failure("batches above 1 without --decode, and bf16, are measured on a GPU only: give --device cuda too");
  }
  const std::unique_ptr<DeviceMemory> memory = open_device(request.device);
  Json settings = {{"seed", request.seed},
                   {"d", request.dims},
                   {"ridge", request.ridge},
                   {"device", cuda ? "cuda" : "cpu"},
                   {"threads", lla_get_num_threads()},
                   {"peak_bytes", request.decode ? "above cache, query and output" : "above inputs and output"}};
  if (cuda) settings["free_bytes"] = "of the device, before and after";
  Results results(request.out, task_of(request), settings, request.command, request.device);
  const std::vector<Line> list = lines(request);
  double total = 0, done = 0;
  for (int64_t n : request.lengths) total += double(n) * n * list.size();
  if (!cuda) {  // the library's threads take memory once
    Heads heads(request.seed, {1, request.decode ? 1 : request.lengths.front(), request.lengths.front(), 16});
    attention(request, heads, false);
  }
  std::map<int64_t, std::vector<float>> naive_heads;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i % kMethods.size() == 0) naive_heads.clear();
    if (cuda) {
      if (!results.contains(list[i].identity())) measure_line(request, *memory, list[i], results, naive_heads);
      results.write();
      progress.report(double(i + 1) / double(list.size()), list[i].method);
      if (progress.stop()) return false;
      continue;
    }
    for (const int64_t n : request.lengths) {
      Json identity = list[i].identity();
      identity["n"] = n;
      if (!results.contains(identity)) {
        results.add(measure(request, list[i], n));
        results.write();
        if (progress.stop()) return false;
      }
      done += double(n) * n;
      progress.report(done / total, fmt::format("n {}", n));
    }
  }
  results.set_summary("exponents", exponents(results.records(), list));
  results.write();
  return true;
}

}  // namespace lla::experiments
