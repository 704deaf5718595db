#include "bench/cuda_bench.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>
#include <stdexcept>

#include "bench/cuda_call.hpp"
#include "core/text.hpp"
#include "plan/machine.hpp"
#include "reference/reference.hpp"

namespace lla::bench {
namespace {

constexpr int64_t kCheckedLength = 2048;  // of the whole head that is compared with fp64
constexpr int64_t kCheckedBackwardLength = 1024;
constexpr int64_t kSampledRows = 8;  // of the timed run itself

double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  const double error = std::sqrt(difference / norm);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

// Relative rms rounding of an output type.
double output_rounding(DType dtype) { return dtype == DType::bf16 ? 1.2e-3 : dtype == DType::f16 ? 1.5e-4 : 0; }

void note_error(CudaResult& result, const char* output, double error) {
  if (error >= result.error) {
    result.error = error;
    result.worst_output = output;
  }
}

// One head of the case against the portable kernels' direct solve in double (which the tests hold to the CPU
// reference).
void check_one_head(const CudaCase& c, CudaResult& result) {
  CudaCase small = c;
  small.batch = small.heads = 1;
  const bool backward = c.what == What::backward;
  small.length = std::min(c.length, backward ? kCheckedBackwardLength : kCheckedLength);
  const CudaInputs inputs = make_cuda_inputs(small);
  CudaCase exact = small;
  exact.dtype = DType::f64;
  exact.implementation = "cuda-portable";
  exact.solver = Solver::direct;
  exact.weights = Weights::automatic;
  CudaCall got(small, inputs, c.dtype == DType::f64 ? DType::f64 : DType::f32), want(exact, inputs, DType::f64);
  for (CudaCall* call : {&got, &want}) {
    call->poison_outputs();
    call->forward();
    if (backward) call->backward();
  }
  note_error(result, "o", backward ? 0 : relative_error(got.o(), want.o()));
  if (backward) {
    note_error(result, "dq", relative_error(got.dq(), want.dq()));
    note_error(result, "dk", relative_error(got.dk(), want.dk()));
    note_error(result, "dv", relative_error(got.dv(), want.dv()));
    note_error(result, c.given_x ? "dx" : "dridge", relative_error(got.dridge_or_dx(), want.dridge_or_dx()));
  }
}

// Rows of the run that is going to be timed, spread over heads and positions, against the CPU reference. Returns the
// error of the worst, over the allowed one for a single row.
double check_rows(const CudaCase& c, const CudaInputs& inputs, const std::vector<double>& o) {
  std::vector<std::future<double>> errors;
  for (int64_t n = 0; n < kSampledRows; ++n) {
    const int64_t i = (2 * n + 1) * c.length / (2 * kSampledRows);
    const int64_t head = n * (c.batch * c.heads) / kSampledRows, b = head / c.heads, h = head % c.heads;
    errors.push_back(std::async(std::launch::async, [&c, &inputs, &o, i, b, h] {
      const int64_t dim = c.dim, keys = c.causal ? i + 1 : c.length;
      const auto rows = [&](const std::vector<double>& t, int64_t begin, int64_t end) {
        std::vector<double> out;
        for (int64_t j = begin; j < end; ++j) {
          const auto from = t.begin() + ((b * c.length + j) * c.heads + h) * dim;
          out.insert(out.end(), from, from + dim);
        }
        return out;
      };
      reference::Head one;
      one.length_q = 1;
      one.length_k = keys;
      one.dim = one.value_dim = dim;
      one.q = rows(inputs.q, i, i + 1);
      one.k = rows(inputs.k, 0, keys);
      one.v = rows(inputs.v, 0, keys);
      if (c.given_x) {
        one.x = rows(inputs.x, i, i + 1);
      } else {
        one.ridge.assign(static_cast<size_t>(dim), static_cast<double>(static_cast<float>(c.ridge)));
      }
      one.scale = 1 / std::sqrt(static_cast<double>(dim));
      return relative_error(rows(o, i, i + 1), reference::forward(one, {}).o);
    }));
  }
  double worst = 0;
  for (auto& error : errors) worst = std::max(worst, error.get());
  return worst;
}

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

void count_iterations(const CudaCase& c, const CudaCall& call, CudaResult& result) {
  const std::vector<double> iterations = call.iterations();
  double weighted = 0, pairs = 0, direct = 0;
  for (size_t r = 0; r < iterations.size(); ++r) {
    const double keys = visible_keys(c, static_cast<int64_t>(r) % c.length);
    pairs += keys;
    weighted += keys * std::max(iterations[r], 0.0);
    direct += iterations[r] < 0 ? 1 : 0;
    result.most_iterations = std::max(result.most_iterations, static_cast<int>(iterations[r]));
  }
  result.iterations = weighted / pairs;
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
void measure_iteration(const CudaCase& c, CudaCall& call, Timer& timer, CudaResult& result,
                       const std::function<void(double)>& progress) {
  double seconds[2], fastest[2], executed[2];
  const int limits[2] = {4, 12};
  for (int n = 0; n < 2; ++n) {
    call.set_solver(Solver::cg, 0, limits[n]);
    const auto times = timer.run([&] { call.forward(); }, c.seconds / 2,
                                 [&](double done) {
                                   if (progress) progress((n + done) / 2);
                                 });
    seconds[n] = times[times.size() / 2];
    fastest[n] = times.front();
    result.repeats = static_cast<int>(times.size());
    count_iterations(c, call, result);
    executed[n] = result.iterations;
  }
  const double difference = executed[1] - executed[0];
  if (difference < 4) throw std::runtime_error("rows stopped by themselves: the time of one iteration cannot be told");
  result.seconds = (seconds[1] - seconds[0]) / difference;
  result.fastest = result.slowest = (fastest[1] - fastest[0]) / difference;
  read_plan(call, c, result);
}

void measure(const CudaCase& c, CudaResult& result, const std::function<void(double)>& progress) {
  const core::CudaDevice device = core::this_machine(c.device).cuda;
  if (!device.present) throw std::runtime_error("no CUDA device: " + device.absent_reason);
  require_cuda(cudaSetDevice(c.device), "selecting the device");
  result.device = device.name;
  result.gate = accuracy_gate(c);
  check_one_head(c, result);
  const auto refuse = [&](const std::string& what, double error, double gate) {
    throw std::runtime_error(
        core::cat("not timed, because the result is wrong: ", what, " is off by ", error, ", allowed are ", gate));
  };
  if (!(result.error <= result.gate)) refuse(result.worst_output, result.error, result.gate);

  const CudaInputs inputs = make_cuda_inputs(c);
  CudaCall call(c, inputs, c.dtype);
  call.poison_outputs();
  call.forward();
  CudaCase as_forward = c;
  as_forward.what = What::forward;
  const double row_gate = 10 * accuracy_gate(as_forward) + output_rounding(c.dtype);
  if (const double error = check_rows(c, inputs, call.o()); !(error <= row_gate)) refuse("a row of o", error, row_gate);

  Timer timer(device);
  double scale = 1;
  if (c.what == What::cg) {
    measure_iteration(c, call, timer, result, progress);
  } else {
    const bool backward = c.what == What::backward;
    const auto times = timer.run([&] { backward ? call.backward() : call.forward(); }, c.seconds, progress);
    result.seconds = times[times.size() / 2];
    result.fastest = times.front();
    result.slowest = times.back();
    result.repeats = static_cast<int>(times.size());
    count_iterations(c, call, result);
    read_plan(call, c, result);
    scale = products(c, result.iterations, result.cached_weights);
  }
  if (c.what == What::cg) scale = result.cached_weights ? 2 : 3;
  double pairs = 0;
  for (int64_t i = 0; i < c.length; ++i) pairs += visible_keys(c, i);
  const double flop = 2 * pairs * static_cast<double>(c.batch * c.heads * c.dim);
  result.tflops = 1e-12 * scale * flop / result.seconds;
}

}  // namespace

double products(const CudaCase& c, double iterations, bool cached_weights) {
  const bool backward = c.what == What::backward;
  if (c.given_x) return backward ? 8 : 4;
  return (backward ? 12 : 6) + (cached_weights ? 2 : 3) * iterations;
}

double accuracy_gate(const CudaCase& c) {
  // A looser tolerance may err more, a tighter one is not held to more than the rounding of 16-bit operands allows.
  const double looser = std::max(1.0, c.tolerance / 1e-3);
  if (c.what != What::backward) return looser * (c.given_x || c.ridge >= 0.1 ? 2e-3 : 4e-3);
  if (c.given_x) return 6e-3;
  const bool tight = c.tolerance <= 1e-4;
  return looser * (c.ridge >= 1     ? (tight ? 2e-3 : 6e-3)
                   : c.ridge >= 0.1 ? (tight ? 5e-3 : 2e-2)
                   : tight          ? 2e-2
                                    : 1.2e-1);
}

Status measure_cuda(const CudaCase& c, CudaResult& result, const std::function<void(double)>& progress) {
  result = {};
  try {
    measure(c, result, progress);
  } catch (const std::exception& e) {
    result.seconds = result.fastest = result.slowest = result.tflops = 0;
    return {LLA_CUDA_ERROR, e.what()};
  }
  return {};
}

}  // namespace lla::bench
