#include "regression/attention.hpp"

#include <algorithm>
#include <limits>

#include "common/attend.hpp"
#include "common/parallel.hpp"
#include "common/results.hpp"
#include "lla/lla.hpp"
#include "regression/device_errors.hpp"
#include "regression/models.hpp"

namespace lla::experiments {
namespace {

constexpr auto kHost = DeviceBuffer::Where::host;

}  // namespace

#if !LLA_EXPERIMENTS_CUDA
void device_squared_errors(DeviceMemory&, const ErrorRows&) { throw Failure("this build has no CUDA"); }
#endif

Attention::Attention(DeviceMemory& memory, const RegressionSetting& setting, std::string implementation)
    : memory_(memory),
      setting_(setting),
      implementation_(std::move(implementation)),
      dim_(setting.d + (setting.kernel == Kernel::rbf ? 1 : 0)),
      k_(memory),
      q_(memory),
      v_(memory),
      target_(memory),
      o_(memory),
      saved_(memory),
      ridge_(memory),
      workspace_(memory),
      device_errors_(memory),
      host_k_(memory, kHost),
      host_q_(memory, kHost),
      host_ridge_(memory, kHost),
      host_errors_(memory, kHost) {}

// Brings the batch and the ridges to the device; host arrays are used where they are.
void Attention::place(const Batch& batch, const std::vector<double>& ridges) {
  batch_ = batch;
  const int64_t rows = batch.count * setting_.length, d = setting_.d;
  const auto on_device = [&](DeviceBuffer& buffer, const float* from, int64_t count) -> const float* {
    if (memory_.device() == Device::cpu) return from;
    float* p = buffer.require_as<float>(count);
    memory_.upload(p, from, count * sizeof(float));
    return p;
  };
  const float *k = batch.k, *q = batch.q;
  if (setting_.kernel == Kernel::rbf) {
    float* longer_k = host_k_.require_as<float>(rows * dim_);
    float* longer_q = host_q_.require_as<float>(rows * dim_);
    extend_for_rbf(rows, d, batch.k, true, longer_k);
    extend_for_rbf(rows, d, batch.q, false, longer_q);
    k = longer_k, q = longer_q;
  }
  k_data_ = on_device(k_, k, rows * dim_);
  q_data_ = q == k ? k_data_ : on_device(q_, q, rows * dim_);
  v_data_ = on_device(v_, batch.v, rows * d);
  target_data_ = batch.target == batch.v ? v_data_ : on_device(target_, batch.target, rows * d);
  float* ridge = host_ridge_.require_as<float>(ridges.size() * dim_);
  for (size_t r = 0; r < ridges.size(); ++r) {
    std::fill_n(ridge + r * dim_, dim_, static_cast<float>(ridges[r]));
    if (setting_.kernel == Kernel::rbf) ridge[(r + 1) * dim_ - 1] = std::numeric_limits<float>::infinity();
  }
  ridge_data_ = on_device(ridge_, ridge, static_cast<int64_t>(ridges.size()) * dim_);
}

Attention::Outputs Attention::forward(size_t ridge, bool strict) {
  const int64_t d = setting_.d, length = setting_.length, batch = batch_.count;
  const int device = memory_.index();
  float* o = o_.require_as<float>(batch * length * d);
  // Strict: queries 1 … n-1 against keys 0 … n-2, causal, so that query i sees keys j <= i - 1.
  const int64_t first = strict ? 1 : 0, rows = length - first;
  const auto view = [&](const float* data, int64_t width) {
    return strided(data, DType::f32, {batch, rows, 1, width}, {length * width, width, width, 1}, device);
  };
  ForwardArgs args;
  args.q = view(q_data_ + first * dim_, dim_);
  args.k = view(k_data_, dim_);
  args.v = view(v_data_, d);
  args.o = view(o, d);
  const float* lambda = ridge_data_ + ridge * dim_;
  args.ridge = setting_.kernel == Kernel::rbf
                   ? strided(lambda, DType::f32, {batch, rows, 1, dim_}, {0, 0, 0, 1}, device)
                   : scalar(lambda, DType::f32, device);
  args.options.scale = setting_.scale;
  args.options.tolerance = kRegressionTolerance;
  args.options.implementation = implementation_.empty() ? nullptr : implementation_.c_str();
  args.stream = memory_.stream();

  ForwardSizes sizes;
  if (const Status s = query(args, sizes); !s) throw Failure(s.message());
  float* saved = saved_.require_as<float>(sizes.saved_elements);
  args.saved = dense(saved, DType::f32, {sizes.saved_elements}, device);
  args.workspace = workspace_.require(sizes.workspace_bytes);
  args.workspace_bytes = sizes.workspace_bytes;
  if (const Status s = lla::forward(args); !s) throw Failure(s.message());

  return {o, saved + sizes.saved_mean_v, length * d, rows * d, first};
}

int64_t Attention::error_offset(bool strict, size_t series, int64_t sequence) const {
  return ((int64_t{strict} * static_cast<int64_t>(series_) + static_cast<int64_t>(series)) * batch_.count + sequence) *
         setting_.length;
}

const double* Attention::errors(bool strict, size_t series, int64_t sequence) const {
  return errors_ + error_offset(strict, series, sequence);
}

void Attention::start(const Batch& batch, const std::vector<double>& ridges, int threads) {
  place(batch, ridges);
  series_ = ridges.size() + 1;
  const bool cuda = memory_.device() == Device::cuda;
  const int64_t length = setting_.length, d = setting_.d, total = error_offset(true, series_, 0);
  double* host = host_errors_.require_as<double>(total);
  double* device = cuda ? device_errors_.require_as<double>(total) : host;
  for (const bool strict : {false, true}) {
    for (size_t r = 0; r < ridges.size(); ++r) {
      const Outputs o = forward(r, strict);
      const auto compare = [&](const float* output, int64_t stride, size_t series) {
        double* errors = device + error_offset(strict, series, 0);
        if (cuda) {
          device_squared_errors(memory_, {batch.count, length - o.first, d, output, stride, target_data_ + o.first * d,
                                          length * d, errors + o.first, length});
          return;
        }
        parallel_for(batch.count, threads, [&](int64_t b, int) {
          squared_errors(static_cast<int>(length - o.first), static_cast<int>(d), output + b * stride,
                         batch.target + (b * length + o.first) * d, errors + b * length + o.first);
        });
      };
      compare(o.lla, o.lla_stride, r);
      if (r == 0) compare(o.softmax, o.softmax_stride, ridges.size());
    }
  }
  if (cuda) memory_.download(host, device, total * sizeof(double));
  errors_ = host;
}

void Attention::finish() {
  memory_.synchronize();
  // A first position that sees nothing predicts 0.
  const std::vector<float> nothing(setting_.d, 0.0f);
  for (size_t s = 0; s < series_; ++s) {
    for (int64_t b = 0; b < batch_.count; ++b) {
      squared_errors(1, setting_.d, nothing.data(), batch_.target + b * setting_.length * setting_.d,
                     const_cast<double*>(errors(true, s, b)));
    }
  }
}

void Attention::outputs(const Batch& batch, double ridge, bool strict, float* lla, float* softmax) {
  place(batch, {ridge});
  const Outputs o = forward(0, strict);
  const int64_t stride = int64_t{setting_.length} * setting_.d, skipped = o.first * setting_.d;
  for (int64_t b = 0; b < batch.count; ++b) {
    std::fill_n(lla + b * stride, skipped, 0.0f);
    std::fill_n(softmax + b * stride, skipped, 0.0f);
    memory_.download(lla + b * stride + skipped, o.lla + b * o.lla_stride, (stride - skipped) * sizeof(float));
    memory_.download(softmax + b * stride + skipped, o.softmax + b * o.softmax_stride,
                     (stride - skipped) * sizeof(float));
  }
  memory_.synchronize();
}

}  // namespace lla::experiments
