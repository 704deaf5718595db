#include "regression/attention.hpp"

#include <algorithm>

#include "common/results.hpp"
#include "lla/lla.hpp"

namespace lla::experiments {

Attention::Attention(DeviceMemory& memory, const RegressionSetting& setting, std::string implementation)
    : memory_(memory),
      setting_(setting),
      implementation_(std::move(implementation)),
      k_(memory),
      v_(memory),
      o_(memory),
      saved_(memory),
      ridge_(memory),
      workspace_(memory) {}

void Attention::run(int64_t batch, const float* k, const float* v, bool strict, float* lla, float* softmax) {
  const int64_t d = setting_.d, length = setting_.length;
  const int64_t size = batch * length * d;
  const bool cuda = memory_.device() == Device::cuda;
  const int device_index = cuda ? 0 : -1;
  const float lambda = static_cast<float>(setting_.ridge);

  const float* kd = k;
  const float* vd = v;
  const float* ridge = &lambda;
  float* od = lla;
  if (cuda) {
    const auto copy = [&](DeviceBuffer& to, const float* from, int64_t count) {
      float* p = static_cast<float*>(to.require(count * sizeof(float)));
      memory_.upload(p, from, count * sizeof(float));
      return p;
    };
    kd = copy(k_, k, size);
    vd = copy(v_, v, size);
    ridge = copy(ridge_, &lambda, 1);
    od = static_cast<float*>(o_.require(size * sizeof(float)));
  }

  // Strict: queries 1 … n-1 against keys 0 … n-2, causal, so that query i sees keys j <= i - 1.
  const int64_t first = strict ? 1 : 0, rows = length - first;
  const auto view = [&](const float* data) {
    return strided(data, DType::f32, {batch, rows, 1, d}, {length * d, d, d, 1}, device_index);
  };
  ForwardArgs args;
  args.q = view(kd + first * d);
  args.k = view(kd);
  args.v = view(vd);
  args.o = view(od + first * d);
  args.ridge = scalar(ridge, DType::f32, device_index);
  args.options.scale = setting_.scale;
  args.options.tolerance = kRegressionTolerance;
  args.options.implementation = implementation_.empty() ? nullptr : implementation_.c_str();

  int64_t saved_elements = 0;
  if (const Status s = saved_size(args, saved_elements); !s) throw Failure(s.message());
  float* saved = static_cast<float*>(saved_.require(saved_elements * sizeof(float)));
  args.saved = dense(saved, DType::f32, {saved_elements}, device_index);
  size_t workspace = 0;
  if (const Status s = workspace_bytes(args, workspace); !s) throw Failure(s.message());
  args.workspace = workspace_.require(workspace);
  args.workspace_bytes = workspace;
  if (const Status s = forward(args); !s) throw Failure(s.message());

  if (cuda) {
    memory_.download(lla, od, size * sizeof(float));
    host_saved_.resize(saved_elements);
    memory_.download(host_saved_.data(), saved, saved_elements * sizeof(float));
    saved = host_saved_.data();
  }
  // Sections of the saved vector (lla.h): max[R], omega[R], mean_k[R][d], mean_v[R][d], x[R][d], each rounded up to 4.
  const auto rounded = [](int64_t n) { return (n + 3) / 4 * 4; };
  const float* mean_v = saved + 2 * rounded(batch * rows) + rounded(batch * rows * d);
  for (int64_t b = 0; b < batch; ++b) {
    if (strict) {
      std::fill_n(lla + b * length * d, d, 0.0f);
      std::fill_n(softmax + b * length * d, d, 0.0f);
    }
    std::copy_n(mean_v + b * rows * d, rows * d, softmax + (b * length + first) * d);
  }
}

}  // namespace lla::experiments
