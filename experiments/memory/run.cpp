#include "memory/run.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <memory>

#include <fmt/core.h>

#include "common/random.hpp"
#include "common/statistics.hpp"
#include "lla/lla.hpp"
#include "memory/naive.hpp"
#include "memory/peak.hpp"

namespace lla::experiments {
namespace {

constexpr std::array<const char*, 3> kMethods = {"naive", "blockwise", "softmax"};
constexpr int kRepeats = 4;
constexpr double kRepeatBelow = 5;  // seconds
constexpr int64_t kFitFrom = 1024;  // shorter ones are dominated by fixed costs

// One head's inputs and output, in memory that has been touched.
struct Head {
  std::vector<float> q, k, v, o;
  Head(const MemoryRun& run, int64_t n) : q(n * run.dim), k(q.size()), v(q.size()), o(q.size(), 0.0f) {
    uint64_t purpose = 0;
    for (auto* x : {&q, &k, &v}) Stream(run.seed, n, purpose++).normal(x->data(), x->size());
  }
};

// Blockwise attention on the device: LLA, or softmax attention as its infinite ridge.
Cost attention(const MemoryRun& run, DeviceMemory& memory, Head& head, int64_t n, bool softmax) {
  const float ridge = softmax ? std::numeric_limits<float>::infinity() : static_cast<float>(run.ridge);
  const bool cuda = memory.device() == Device::cuda;
  const int index = cuda ? 0 : -1;
  const int64_t d = run.dim;
  const size_t bytes = head.q.size() * sizeof(float);
  DeviceBuffer q(memory), k(memory), v(memory), o(memory), r(memory), workspace(memory);
  const auto place = [&](DeviceBuffer& buffer, const std::vector<float>& x) -> const void* {
    if (!cuda) return x.data();
    void* p = buffer.require(bytes);
    memory.upload(p, x.data(), bytes);
    return p;
  };
  const void* ridge_data = &ridge;
  if (cuda) {
    void* p = r.require(sizeof ridge);
    memory.upload(p, &ridge, sizeof ridge);
    ridge_data = p;
  }
  ForwardArgs args;
  args.q = dense(place(q, head.q), DType::f32, {1, n, 1, d}, index);
  args.k = dense(place(k, head.k), DType::f32, {1, n, 1, d}, index);
  args.v = dense(place(v, head.v), DType::f32, {1, n, 1, d}, index);
  args.o = dense(cuda ? o.require(bytes) : head.o.data(), DType::f32, {1, n, 1, d}, index);
  args.ridge = scalar(ridge_data, DType::f32, index);
  const auto call = [&] {
    size_t need = 0;
    if (const Status s = workspace_bytes(args, need); !s) throw Failure(s.message());
    args.workspace = workspace.require(need);
    args.workspace_bytes = need;
    if (const Status s = forward(args); !s) throw Failure(s.message());
    memory.synchronize();
  };
  if (!cuda) {
    Cost cost = measure_cost(call);  // the first call takes the memory; the quickest of a few tells the time
    for (int i = 0; i < kRepeats && cost.seconds < kRepeatBelow; ++i)
      cost.seconds = std::min(cost.seconds, measure_cost(call).seconds);
    return cost;
  }
  call();  // loads the kernels
  const auto start = std::chrono::steady_clock::now();
  call();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
          double(args.workspace_bytes)};
}

Json measure(const MemoryRun& run, DeviceMemory& memory, const std::string& method, int64_t n) {
  Json record = {{"task", "memory"},
                 {"method", method},
                 {"device", run.device == Device::cuda ? "cuda" : "cpu"},
                 {"d", run.dim},
                 {"n", n},
                 {"fits", true},
                 {"seconds", nullptr},
                 {"peak_bytes", nullptr}};
  Cost cost;
  if (method == "naive" && naive_bytes(n, run.dim) > run.limit_bytes) {
    record["fits"] = false;
    record["peak_bytes"] = naive_bytes(n, run.dim);  // what it would need
    return record;
  }
  Head head(run, n);
  if (method == "naive") {
    cost = measure_cost([&] {
      naive_lla(n, run.dim, 1 / std::sqrt(double(run.dim)), run.ridge, head.q.data(), head.k.data(), head.v.data(),
                head.o.data(), lla_get_num_threads());
    });
  } else {
    cost = attention(run, memory, head, n, method == "softmax");
  }
  record["seconds"] = cost.seconds;
  record["peak_bytes"] = cost.peak_bytes;
  return record;
}

Json exponents(const Json& records) {
  Json fits = Json::array();
  for (const char* method : kMethods) {
    std::vector<Measured> time, memory;
    for (const Json& r : records) {
      const int64_t n = r["n"];
      const bool counts =
          r["method"] == method && r["fits"] == true && (n >= kFitFrom || std::string(method) == "naive");
      if (!counts || n < 256) continue;
      time.push_back({double(n), {r["seconds"].get<double>()}});
      memory.push_back({double(n), {std::max(1.0, r["peak_bytes"].get<double>())}});
    }
    if (time.size() < 2) continue;
    fits.push_back({{"method", method},
                    {"memory", fit_exponent(memory, false).value},
                    {"time", fit_exponent(time, false).value},
                    {"points", time.size()}});
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
  const std::unique_ptr<DeviceMemory> memory = open_device(request.device);
  const Json settings = {{"seed", request.seed},
                         {"d", request.dim},
                         {"ridge", request.ridge},
                         {"device", request.device == Device::cuda ? "cuda" : "cpu"},
                         {"threads", lla_get_num_threads()},
                         {"peak_bytes", "above inputs and output"}};
  Results results(request.out, "memory", settings, request.command, request.device);
  double total = 0, done = 0;
  for (int64_t n : request.lengths) total += double(n) * n;
  for (int64_t n : request.lengths) {
    for (const char* method : kMethods) {
      if (std::string(method) == "naive" && request.device == Device::cuda) continue;
      if (results.contains({{"method", method}, {"n", n}})) continue;
      results.add(measure(request, *memory, method, n));
      results.write();
      if (progress.stop()) return false;
    }
    done += double(n) * n;
    progress.report(done / total, fmt::format("n {}", n));
  }
  results.set_summary("exponents", exponents(results.records()));
  results.write();
  return true;
}

}  // namespace lla::experiments
