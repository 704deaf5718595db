#include "memory/device_call.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>

#include "common/random.hpp"
#include "common/results.hpp"
#include "core/convert.hpp"
#include "lla/lla.hpp"
#include "memory/naive_cuda.hpp"

namespace lla::experiments {
namespace {

constexpr int64_t kChunk = int64_t{1} << 22;  // normal numbers drawn; longer inputs repeat them
constexpr int64_t kHeadRows = 128;            // of the output that come back

class Call {
 public:
  Call(DeviceMemory& memory, const DeviceCase& c)
      : memory_(memory),
        case_(c),
        q_(memory),
        k_(memory),
        v_(memory),
        o_(memory),
        ridge_(memory),
        x_(memory),
        lengths_(memory),
        work_(memory) {}

  // Inputs and output; false where the device has no room for them.
  bool allocate_tensors() {
    try {
      for (DeviceBuffer* buffer : {&q_, &x_, &o_}) buffer->require(bytes(case_.queries()));
      for (DeviceBuffer* buffer : {&k_, &v_}) buffer->require(bytes(case_.n));
      ridge_.require(sizeof(float));
      lengths_.require(case_.batch * sizeof(int32_t));
    } catch (const Failure&) {
      return false;
    }
    const float infinite = std::numeric_limits<float>::infinity();
    const float lambda = case_.method == "softmax" ? infinite : static_cast<float>(case_.ridge);
    memory_.upload(ridge_.require(sizeof lambda), &lambda, sizeof lambda);
    const std::vector<int32_t> lengths(case_.batch, static_cast<int32_t>(case_.n));
    memory_.upload(lengths_.require(1), lengths.data(), lengths.size() * sizeof(int32_t));
    const std::vector<std::byte> zeros(given_x() ? bytes(case_.queries()) : 0);
    memory_.upload(x_.require(1), zeros.data(), zeros.size());
    memory_.synchronize();
    return true;
  }

  // Bytes of the working set, or nothing where the library refuses the problem.
  std::optional<double> work_bytes() {
    if (case_.method == "naive") return naive_blocks(case_.naive_sizes(), element_bytes()).total();
    args_.q = view(q_, case_.queries()), args_.o = view(o_, case_.queries());
    args_.k = view(k_, case_.n), args_.v = view(v_, case_.n);
    if (case_.decode) args_.seqlens_k = dense(lengths_.require(1), DType::i32, {case_.batch}, memory_.index());
    if (given_x()) {
      args_.x = view(x_, case_.queries());
    } else {
      args_.ridge = scalar(ridge_.require(sizeof(float)), DType::f32, memory_.index());
    }
    args_.stream = memory_.stream();
    size_t need = 0;
    if (!workspace_bytes(args_, need)) return std::nullopt;
    return static_cast<double>(need);
  }

  bool allocate_work(double bytes) {
    try {
      work_.require(static_cast<size_t>(std::max(bytes, 256.0)));
    } catch (const Failure&) {
      return false;
    }
    return true;
  }

  void fill() {
    uint64_t purpose = 0;
    for (DeviceBuffer* buffer : {&q_, &k_, &v_}) {
      const int64_t length = buffer == &q_ ? case_.queries() : case_.n;
      const int64_t total = case_.batch * length * case_.d, chunk = std::min(total, kChunk);
      std::vector<float> numbers(chunk);
      std::vector<uint16_t> rounded(case_.bf16 ? chunk : 0);
      Stream(case_.seed, case_.n, purpose++).normal(numbers.data(), numbers.size());
      for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = core::to_bf16(numbers[i]).bits;
      auto* to = static_cast<std::byte*>(buffer->require(1));
      const void* from = case_.bf16 ? static_cast<const void*>(rounded.data()) : numbers.data();
      for (int64_t at = 0; at < total; at += chunk)
        memory_.upload(to + at * element_bytes(), from, std::min(chunk, total - at) * element_bytes());
      memory_.synchronize();
    }
  }

  double call() {
    const auto start = std::chrono::steady_clock::now();
    if (case_.method == "naive") {
      const NaiveBlocks bytes = naive_blocks(case_.naive_sizes(), element_bytes());
      auto* at = static_cast<std::byte*>(work_.require(1));
      naive_lla_cuda(memory_,
                     {case_.naive_sizes(), case_.bf16, static_cast<float>(1 / std::sqrt(double(case_.d))),
                      static_cast<float>(case_.ridge), q_.require(1), k_.require(1), v_.require(1), o_.require(1)},
                     at, at + static_cast<size_t>(bytes.weights),
                     reinterpret_cast<float*>(at + static_cast<size_t>(bytes.weights + bytes.differences)));
    } else {
      args_.workspace = work_.require(1);
      args_.workspace_bytes = work_.size();
      if (const Status s = forward(args_); !s) throw Failure(s.message());
    }
    memory_.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  std::vector<float> output_head() {
    const int64_t count = std::min(case_.queries(), kHeadRows) * case_.d;
    std::vector<float> head(count);
    std::vector<uint16_t> rounded(case_.bf16 ? count : 0);
    memory_.download(case_.bf16 ? static_cast<void*>(rounded.data()) : head.data(), o_.require(1),
                     count * element_bytes());
    memory_.synchronize();
    for (size_t i = 0; i < rounded.size(); ++i) head[i] = core::to_float(core::bf16{rounded[i]});
    return head;
  }

 private:
  bool given_x() const { return case_.decode && case_.method == "softmax"; }
  int64_t element_bytes() const { return case_.bf16 ? 2 : 4; }
  size_t bytes(int64_t length) const { return static_cast<size_t>(case_.batch * length * case_.d * element_bytes()); }
  Tensor view(DeviceBuffer& buffer, int64_t length) {
    return dense(buffer.require(1), case_.bf16 ? DType::bf16 : DType::f32, {case_.batch, length, 1, case_.d},
                 memory_.index());
  }

  DeviceMemory& memory_;
  DeviceCase case_;
  DeviceBuffer q_, k_, v_, o_, ridge_, x_, lengths_, work_;
  ForwardArgs args_;
};

}  // namespace

// Each block at a multiple of 256 bytes.
NaiveBlocks naive_blocks(const NaiveSizes& s, int64_t element_bytes) {
  const auto rounded = [](double bytes) { return std::ceil(bytes / 256) * 256; };
  const double rows = double(s.batch) * double(s.queries), pairs = rows * double(s.keys);
  return {rounded(pairs * element_bytes), rounded(pairs * s.dim * element_bytes), rounded(4.0 * rows * s.dim * s.dim)};
}

#if !LLA_EXPERIMENTS_CUDA
void naive_lla_cuda(DeviceMemory&, const NaiveProblem&, void*, void*, float*) {
  throw Failure("this build has no CUDA");
}
#endif

DeviceCost measure_on_device(DeviceMemory& memory, const DeviceCase& c, bool run) {
  DeviceCost cost;
  Call call(memory, c);
  const bool tensors_fit = call.allocate_tensors();
  if (!tensors_fit) {
    cost.peak_bytes = c.method == "naive" ? naive_blocks(c.naive_sizes(), c.bf16 ? 2 : 4).total() : 0;
    return cost;
  }
  const std::optional<double> need = call.work_bytes();
  if (!need) return cost;
  cost.peak_bytes = *need;
  const size_t before = memory.free_bytes();
  if (!call.allocate_work(*need)) return cost;
  cost.fits = true;
  size_t least = memory.free_bytes();
  if (run) {
    call.fill();
    call.call();
    least = std::min(least, memory.free_bytes());
    cost.seconds = call.call();
    cost.ran = true;
    cost.head = call.output_head();
  }
  // The device counts in large units: what is smaller than one may cost it nothing, and then counts as asked for.
  cost.peak_bytes = std::max(*need, static_cast<double>(before) - static_cast<double>(least));
  return cost;
}

}  // namespace lla::experiments
