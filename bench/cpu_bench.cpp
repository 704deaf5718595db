#include "bench/cpu_bench.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/blas.hpp"
#include "bench/naive.hpp"
#include "core/convert.hpp"
#include "core/text.hpp"
#include "cpu/cpu.hpp"
#include "cpu/work.hpp"

namespace lla::bench {
namespace {

constexpr int kMinRepeats = 5;

// Storage of one tensor in the case's type.
struct Buffer {
  std::vector<std::byte> bytes;
  DType dtype;

  Buffer(DType type, int64_t elements) : bytes(static_cast<size_t>(elements * core::size_of(type))), dtype(type) {}
  Buffer(DType type, const std::vector<double>& values) : Buffer(type, static_cast<int64_t>(values.size())) {
    for (size_t i = 0; i < values.size(); ++i) core::store(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
  }
};

// A part of the trained heads for every batch entry.
std::vector<double> repeated(const CpuCase& c, std::vector<double> data::TrainedHead::*part) {
  const std::vector<double> one = data::interleaved(*c.trained, part, c.length, c.heads);
  std::vector<double> all;
  for (int64_t b = 0; b < c.batch; ++b) all.insert(all.end(), one.begin(), one.end());
  return all;
}

data::Tensors make_tensors(const CpuCase& c) {
  using Head = data::TrainedHead;
  if (c.trained) return {repeated(c, &Head::q), repeated(c, &Head::k), repeated(c, &Head::v)};
  return data::make(c.kind, 1, {c.batch, c.length, c.length, c.heads, c.heads, c.dim, c.dim});
}
std::vector<double> make_gradient(const CpuCase& c, const data::Tensors& t) {
  return c.trained && !c.trained->front().grad_o.empty() ? repeated(c, &data::TrainedHead::grad_o) : t.v;
}
std::vector<double> make_ridge(const CpuCase& c) {
  return c.trained ? repeated(c, &data::TrainedHead::ridge) : std::vector<double>{c.ridge};
}

// One call of the case, ready to be repeated.
class Call {
 public:
  explicit Call(const CpuCase& c)
      : case_(c),
        tensors_(make_tensors(c)),
        q_(c.dtype, tensors_.q),
        k_(c.dtype, tensors_.k),
        v_(c.dtype, tensors_.v),
        o_(c.dtype, elements()),
        grad_(c.dtype, make_gradient(c, tensors_)),
        dq_(c.dtype, elements()),
        dk_(c.dtype, elements()),
        dv_(c.dtype, elements()),
        ridge_(ridge_dtype(), make_ridge(c)),
        dridge_(ridge_dtype(), ridge_elements()) {}

  Status prepare() {
    fill(forward_);
    forward_.o = view(o_);
    ForwardSizes sizes;
    LLA_RETURN_IF_ERROR(query(forward_, sizes));
    const int64_t saved = sizes.saved_elements;
    saved_.assign(static_cast<size_t>(saved * core::size_of(ridge_dtype())), std::byte{});
    forward_.saved = dense(saved_.data(), ridge_dtype(), {saved});
    LLA_RETURN_IF_ERROR(give_workspace(forward_));
    if (case_.what != What::backward) return {};
    LLA_RETURN_IF_ERROR(lla::forward(forward_));
    fill(backward_);
    backward_.saved = forward_.saved;
    backward_.grad_o = view(grad_);
    backward_.dq = view(dq_);
    backward_.dk = view(dk_);
    backward_.dv = view(dv_);
    backward_.dridge = ridge_view(dridge_);
    return give_workspace(backward_);
  }

  Status run() { return case_.what == What::backward ? lla::backward(backward_) : lla::forward(forward_); }
  void set_iterations(int iterations) { forward_.options.max_iterations = iterations; }
  size_t workspace_bytes() const { return workspace_.size(); }

  bool cached_weights() const {
    char text[4096];
    const lla_status status = case_.what == What::backward ? lla_backward_plan(&backward_, text, sizeof text)
                                                           : lla_forward_plan(&forward_, text, sizeof text);
    return status == LLA_OK && std::string(text).find("weights: cached") != std::string::npos;
  }

  const data::Tensors& tensors() const { return tensors_; }

 private:
  int64_t elements() const { return case_.batch * case_.length * case_.heads * case_.dim; }
  DType ridge_dtype() const { return case_.dtype == DType::f64 ? DType::f64 : DType::f32; }
  Tensor view(const Buffer& b) const {
    return dense(b.bytes.data(), b.dtype, {case_.batch, case_.length, case_.heads, case_.dim});
  }

  int64_t ridge_elements() const { return case_.trained ? case_.batch * case_.length * case_.heads : 1; }
  Tensor ridge_view(const Buffer& b) const {
    if (!case_.trained) return dense(b.bytes.data(), b.dtype, {});
    return dense(b.bytes.data(), b.dtype, {case_.batch, case_.length, case_.heads});
  }

  template <class Args>
  void fill(Args& args) {
    args.q = view(q_);
    args.k = view(k_);
    args.v = view(v_);
    args.ridge = ridge_view(ridge_);
    args.options.implementation = "cpu";
    args.options.causal = case_.causal;
    args.options.tolerance = case_.tolerance;
    args.options.solver = static_cast<int32_t>(case_.solver);
  }

  template <class Args>
  Status give_workspace(Args& args) {
    size_t bytes = 0;
    LLA_RETURN_IF_ERROR(lla::workspace_bytes(args, bytes));
    workspace_.assign(bytes + kAlignment, std::byte{});
    const auto address = reinterpret_cast<uintptr_t>(workspace_.data());
    args.workspace = workspace_.data() + (kAlignment - address % kAlignment) % kAlignment;
    args.workspace_bytes = bytes;
    return {};
  }

  static constexpr size_t kAlignment = 256;
  CpuCase case_;
  data::Tensors tensors_;
  Buffer q_, k_, v_, o_, grad_, dq_, dk_, dv_, ridge_, dridge_;
  std::vector<std::byte> saved_, workspace_;
  ForwardArgs forward_;
  BackwardArgs backward_;
};

struct Timed {
  double seconds = 0;
  cpu::Work work;
};

Status time_once(Call& call, Timed& timed) {
  const cpu::Work before = cpu::work_done();
  const auto start = std::chrono::steady_clock::now();
  LLA_RETURN_IF_ERROR(call.run());
  timed.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  timed.work = cpu::work_done() - before;
  return {};
}

// The best time of a case over its repeats. An iteration of conjugate gradients is what the best long run takes more
// than the best short one, over the iterations between them.
class Best {
 public:
  explicit Best(const CpuCase& c) : cg_(c.what == What::cg) {}

  Status sample(Call& call) {
    if (!cg_) return keep(call, long_);
    call.set_iterations(kShort);
    LLA_RETURN_IF_ERROR(keep(call, short_));
    call.set_iterations(kLong);
    return keep(call, long_);
  }
  Timed result() const {
    if (!cg_) return long_;
    Timed one{(long_.seconds - short_.seconds) / (kLong - kShort), long_.work - short_.work};
    one.work.product_flops /= kLong - kShort;
    return one;
  }

 private:
  static constexpr int kShort = 2, kLong = 10;

  static Status keep(Call& call, Timed& best) {
    Timed now;
    LLA_RETURN_IF_ERROR(time_once(call, now));
    if (best.seconds == 0 || now.seconds < best.seconds) best = now;
    return {};
  }

  bool cg_;
  Timed short_, long_;
};

// A few rows of the first head, spread over its length, stand for all: a row costs in proportion to its keys.
double naive_seconds(const CpuCase& c, const data::Tensors& t) {
  std::vector<float> q, k, v;
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t d = 0; d < c.dim; ++d) {
      const size_t at = static_cast<size_t>(i * c.heads * c.dim + d);
      q.push_back(static_cast<float>(t.q[at]));
      k.push_back(static_cast<float>(t.k[at]));
      v.push_back(static_cast<float>(t.v[at]));
    }
  }
  constexpr int kSamples = 12;
  double seconds = 0;
  for (int i = 0; i < kSamples; ++i) {
    const int64_t row = (2 * i + 1) * c.length / (2 * kSamples);
    seconds += naive_forward_seconds(q, k, v, c.length, c.dim, static_cast<float>(c.ridge),
                                     static_cast<float>(c.tolerance), row, 1);
  }
  return seconds / kSamples * static_cast<double>(c.length * c.heads * c.batch);
}

double exponent(const std::vector<int64_t>& x, const std::vector<double>& y) {
  double sx = 0, sy = 0, sxx = 0, sxy = 0;
  const double n = static_cast<double>(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double a = std::log(static_cast<double>(x[i])), b = std::log(y[i]);
    sx += a;
    sy += b;
    sxx += a * a;
    sxy += a * b;
  }
  return (n * sxy - sx * sy) / (n * sxx - sx * sx);
}

CpuCase adjusted(CpuCase c) {
  if (c.what == What::cg) {  // every row shall run the iterations it is told to
    c.solver = Solver::cg;
    c.tolerance = 0;
  }
  return c;
}

// The library's thread count for the duration of a measurement.
class Threads {
 public:
  explicit Threads(int threads) : before_(cpu::num_threads()) {
    if (threads > 0) cpu::set_num_threads(threads);
  }
  ~Threads() { cpu::set_num_threads(before_); }

 private:
  int before_;
};

}  // namespace

Status measure_cpu(const CpuCase& wanted, CpuResult& result, const std::function<void(double)>& progress) {
  const CpuCase c = adjusted(wanted);
  const Threads threads(c.threads);
  Call call(c);
  LLA_RETURN_IF_ERROR(call.prepare());
  BlasYardstick blas(cpu::num_threads());
  result = {};
  result.threads = cpu::num_threads();
  result.workspace_bytes = call.workspace_bytes();
  result.cached_weights = call.cached_weights();
  Best timer(c);
  Timed warm_up;
  LLA_RETURN_IF_ERROR(time_once(call, warm_up));
  const auto start = std::chrono::steady_clock::now();
  double spent = 0;
  while (result.repeats < kMinRepeats || spent < c.seconds) {
    if (have_blas()) result.blas_gflops = std::max(result.blas_gflops, blas.gflops());
    LLA_RETURN_IF_ERROR(timer.sample(call));
    ++result.repeats;
    spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (progress) progress(std::min({spent / c.seconds, static_cast<double>(result.repeats) / kMinRepeats, 1.0}));
  }
  const double rows = static_cast<double>(c.batch * c.heads * c.length);
  const Timed best = timer.result();
  result.seconds = best.seconds;
  result.gflops = static_cast<double>(best.work.product_flops + best.work.direct_flops) / best.seconds * 1e-9;
  result.ratio = result.blas_gflops > 0 ? result.gflops / result.blas_gflops : 0;
  if (best.work.cg_pairs > 0)
    result.iterations = static_cast<double>(best.work.iteration_pairs) / static_cast<double>(best.work.cg_pairs);
  result.direct_rows = static_cast<double>(best.work.direct_rows) / rows;
  if (c.what == What::forward && c.causal) result.naive_seconds = naive_seconds(c, call.tensors());
  return {};
}

Status measure_growth(const CpuCase& wanted, const std::vector<int64_t>& lengths, Growth& growth,
                      const std::function<void(double)>& progress) {
  growth = {};
  growth.lengths = lengths;
  std::vector<double> bytes;
  for (size_t i = 0; i < lengths.size(); ++i) {
    CpuCase c = adjusted(wanted);
    c.length = lengths[i];
    const Threads threads(c.threads);
    Call call(c);
    LLA_RETURN_IF_ERROR(call.prepare());
    Best timer(c);
    for (int repeat = 0; repeat <= kMinRepeats; ++repeat) LLA_RETURN_IF_ERROR(timer.sample(call));
    growth.seconds.push_back(timer.result().seconds);
    growth.workspace_bytes.push_back(call.workspace_bytes());
    bytes.push_back(static_cast<double>(call.workspace_bytes()));
    if (progress) progress(static_cast<double>(i + 1) / static_cast<double>(lengths.size()));
  }
  growth.time_exponent = exponent(lengths, growth.seconds);
  growth.memory_exponent = exponent(lengths, bytes);
  return {};
}

}  // namespace lla::bench
