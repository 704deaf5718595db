#include "bench/cuda_bench.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>

#include "bench/cuda_check.hpp"
#include "core/text.hpp"
#include "plan/machine.hpp"

namespace lla::bench {
namespace {

// Median, fastest and slowest of event-timed runs, each after the L2 cache was overwritten.
class Timer {
 public:
  explicit Timer(const core::CudaDevice& device)
      : flush_(static_cast<size_t>(std::max<int64_t>(4 * device.l2_bytes, 1 << 26))) {
    require_cuda(cudaEventCreate(&start_), "creating an event");
    require_cuda(cudaEventCreate(&stop_), "creating an event");
  }
  ~Timer() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  std::vector<double> run(const std::function<void()>& call, double seconds,
                          const std::function<void(double)>& progress) {
    for (int warm_up = 0; warm_up < 2; ++warm_up) once(call);
    std::vector<double> times;
    for (double spent = 0; static_cast<int>(times.size()) < kMinCudaRepeats || spent < seconds;) {
      times.push_back(once(call));
      spent += times.back();
      if (progress) progress(std::min(1.0, spent / seconds));
    }
    std::sort(times.begin(), times.end());
    return times;
  }

 private:
  double once(const std::function<void()>& call) {
    // The call is queued while the flush runs, so that the host's time for its launches is not measured.
    require_cuda(cudaMemsetAsync(flush_.data(), 0, flush_.bytes()), "flushing the cache");
    require_cuda(cudaEventRecord(start_), "recording an event");
    call();
    require_cuda(cudaEventRecord(stop_), "recording an event");
    require_cuda(cudaEventSynchronize(stop_), "waiting for the device");
    float milliseconds = 0;
    require_cuda(cudaEventElapsedTime(&milliseconds, start_, stop_), "reading an event");
    return 1e-3 * static_cast<double>(milliseconds);
  }

  DeviceArray flush_;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

double visible_keys(const CudaCase& c, int64_t i) { return static_cast<double>(c.causal ? i + 1 : c.length); }

double visible_pairs(const CudaCase& c) {
  double pairs = 0;
  for (int64_t i = 0; i < c.length; ++i) pairs += visible_keys(c, i);
  return pairs * static_cast<double>(c.batch * c.heads);
}

constexpr int64_t kBlockRows = 128;

void count_iterations(const CudaCase& c, const CudaCall& call, CudaResult& result) {
  const std::vector<double> iterations = call.iterations();  // head by head
  double weighted = 0, in_blocks = 0, pairs = 0, direct = 0;
  for (size_t head = 0; head < iterations.size(); head += static_cast<size_t>(c.length)) {
    for (int64_t first = 0; first < c.length; first += kBlockRows) {
      double most = 0, keys_of_block = 0;
      for (int64_t i = first; i < std::min(first + kBlockRows, c.length); ++i) {
        const double count = iterations[head + static_cast<size_t>(i)], keys = visible_keys(c, i);
        weighted += keys * std::max(count, 0.0);
        direct += count < 0 ? 1 : 0;
        most = std::max(most, count);
        keys_of_block += keys;
      }
      in_blocks += keys_of_block * most;
      pairs += keys_of_block;
      result.most_iterations = std::max(result.most_iterations, static_cast<int>(most));
    }
  }
  result.iterations = weighted / pairs;
  result.block_iterations = in_blocks / pairs;
  result.direct_rows = c.given_x ? 0 : direct / static_cast<double>(iterations.size());
}

// What the planner decided, from the plan's own text.
void read_plan(CudaCall& call, const CudaCase& c, CudaResult& result) {
  char text[4096];
  const lla_status status = c.what == What::backward ? lla_backward_plan(&call.backward_args(), text, sizeof text)
                                                     : lla_forward_plan(&call.forward_args(), text, sizeof text);
  if (status != LLA_OK) throw std::runtime_error(lla_last_error());
  result.plan = text;
  const auto line = [&](const std::string& key) {
    const size_t at = result.plan.find(key + ": ");
    if (at == std::string::npos) return std::string();
    const size_t begin = at + key.size() + 2;
    return result.plan.substr(begin, result.plan.find('\n', begin) - begin);
  };
  result.implementation = line("implementation");
  result.cached_weights = line("weights") == "cached";
  result.workspace_bytes =
      c.what == What::backward ? call.backward_args().workspace_bytes : call.forward_args().workspace_bytes;
}

// One iteration: runs of many minus runs of few, over the difference in iterations executed.
struct Iteration {
  double seconds, fastest;
  int repeats;
};
Iteration measure_iteration(const CudaCase& c, CudaCall& call, Timer& timer,
                            const std::function<void(double)>& progress) {
  double seconds[2], fastest[2], executed[2];
  const int limits[2] = {4, 12};
  Iteration result{};
  for (int n = 0; n < 2; ++n) {
    call.set_solver(Solver::cg, 0, limits[n]);
    const auto times = timer.run([&] { call.forward(); }, c.seconds / 2,
                                 [&](double done) {
                                   if (progress) progress((n + done) / 2);
                                 });
    seconds[n] = times[times.size() / 2];
    fastest[n] = times.front();
    result.repeats = static_cast<int>(times.size());
    CudaResult counted;
    count_iterations(c, call, counted);
    executed[n] = counted.iterations;
  }
  const double difference = executed[1] - executed[0];
  if (difference < 4) throw std::runtime_error("rows stopped by themselves: the time of one iteration cannot be told");
  result.seconds = (seconds[1] - seconds[0]) / difference;
  result.fastest = (fastest[1] - fastest[0]) / difference;
  return result;
}

[[noreturn]] void refuse(const std::string& what, double error, double gate) {
  throw std::runtime_error(
      core::cat("not timed, because the result is wrong: ", what, " is off by ", error, ", allowed are ", gate));
}

}  // namespace

struct CudaBench::Shared {
  struct Inputs {
    CudaCase made_for;
    CudaInputs values;
  };
  struct Rows {
    CudaCase made_for;
    std::vector<std::vector<double>> exact;
  };
  struct Head {
    CudaCase made_for;
    CudaInputs inputs;
    Outputs exact;
  };
  std::unique_ptr<Inputs> inputs;  // of the last problem: two at once would be much memory
  std::unique_ptr<Rows> rows;
  std::vector<Head> heads;  // few and small: all of them

  const Head& head(const CudaCase& c) {
    for (const Head& made : heads) {
      if (same_problem(made.made_for, c)) return made;
    }
    Head made{c, make_cuda_inputs(c), {}};
    made.exact = exact_head(c, made.inputs);
    heads.push_back(std::move(made));
    return heads.back();
  }

  const CudaInputs& inputs_of(const CudaCase& c) {
    if (inputs == nullptr || !same_inputs(inputs->made_for, c)) {
      inputs.reset();
      inputs = std::make_unique<Inputs>(Inputs{c, make_cuda_inputs(c)});
    }
    return inputs->values;
  }

  const std::vector<std::vector<double>>& rows_of(const CudaCase& c) {
    if (rows == nullptr || !same_problem(rows->made_for, c)) {
      rows = std::make_unique<Rows>(Rows{c, exact_rows(c, inputs_of(c))});
    }
    return rows->exact;
  }

  void check_head(const CudaCase& c, CudaResult& result) {
    const CudaCase small = one_head(c);
    const Head& want = head(small);
    const Outputs got = computed_head(small, want.inputs);
    for (size_t i = 0; i < got.size(); ++i) {
      const double error = relative_error(got[i].values, want.exact[i].values);
      if (error < result.error) continue;
      result.error = error;
      result.worst_output = got[i].name;
    }
    result.gate = accuracy_gate(c);
    if (!(result.error <= result.gate)) refuse(result.worst_output, result.error, result.gate);
  }

  void check_rows(const CudaCase& c, const std::vector<double>& o) {
    const auto got = sampled_rows(c, o);
    const auto& want = rows_of(c);
    for (size_t i = 0; i < got.size(); ++i) {
      const double error = relative_error(got[i], want[i]);
      if (!(error <= row_gate(c))) refuse("a row of o", error, row_gate(c));
    }
  }

  void measure(const CudaCase& c, CudaResult& result, const std::function<void(double)>& progress) {
    const core::CudaDevice device = core::this_machine(c.device).cuda;
    if (!device.present) throw std::runtime_error("no CUDA device: " + device.absent_reason);
    require_cuda(cudaSetDevice(c.device), "selecting the device");
    result.device = device.name;
    check_head(c, result);
    CudaCall call(c, inputs_of(c), c.dtype);
    call.poison_outputs();
    call.forward();
    check_rows(c, call.o());

    Timer timer(device);
    const bool backward = c.what == What::backward;
    if (c.what != What::cg) {
      const auto once = [&] { backward ? call.backward() : call.forward(); };
      if (backward) once();  // the forward has just run
      const std::vector<std::byte> bits = call.output_bits(backward);
      const auto times = timer.run(once, c.seconds, progress);
      if (call.output_bits(backward) != bits) throw std::runtime_error("not timed, because two runs differ");
      result.seconds = times[times.size() / 2];
      result.fastest = times.front();
      result.slowest = times.back();
      result.repeats = static_cast<int>(times.size());
      count_iterations(c, call, result);
    }
    read_plan(call, c, result);
    if (c.what == What::cg || c.with_iteration) {
      const Iteration one = measure_iteration(c, call, timer, progress);
      result.iteration_seconds = one.seconds;
      result.iteration_tflops = 1e-12 * (result.cached_weights ? 2 : 3) * product_flop(c) / one.seconds;
      if (c.what == What::cg) {
        result.seconds = one.seconds;
        result.fastest = result.slowest = one.fastest;
        result.repeats = one.repeats;
        result.tflops = result.iteration_tflops;
      }
    }
    if (c.what != What::cg) {
      result.tflops = 1e-12 * products(c, result.iterations, result.cached_weights) * product_flop(c) / result.seconds;
    }
  }
};

CudaBench::CudaBench() : shared_(std::make_unique<Shared>()) {}
CudaBench::~CudaBench() = default;

Status CudaBench::measure(const CudaCase& c, CudaResult& result, const std::function<void(double)>& progress) {
  result = {};
  try {
    shared_->measure(c, result, progress);
  } catch (const std::exception& e) {
    result.seconds = result.fastest = result.slowest = result.tflops = 0;
    result.iteration_seconds = result.iteration_tflops = 0;
    return {LLA_CUDA_ERROR, e.what()};
  }
  return {};
}

double products(const CudaCase& c, double iterations, bool cached_weights) {
  const bool backward = c.what == What::backward;
  if (c.given_x) return backward ? 8 : 4;
  const int around = backward ? 12 : cached_weights ? 4 : 5;  // the solve
  return around + (cached_weights ? 2 : 3) * iterations;
}

double product_flop(const CudaCase& c) { return 2 * visible_pairs(c) * static_cast<double>(c.dim); }

double h200_iteration_floor(const CudaCase& c, bool cached_weights) {
  constexpr double kFlops = 790e12, kBytesPerSecond = 4.3e12;
  if (!cached_weights) return 3 * product_flop(c) / kFlops;
  return std::max(2 * product_flop(c) / kFlops, 2 * visible_pairs(c) / kBytesPerSecond);
}

}  // namespace lla::bench
