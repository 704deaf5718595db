// Local Linear Attention from C++, next to softmax attention, on values that depend linearly on their keys.
#include <lla/lla.hpp>

#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

namespace {

constexpr int64_t B = 1, L = 256, H = 2, D = 16;

// README: C++
// (B, L, H, D) tensors in, (B, L, H, D) out; any strides, f32, f64, bf16 or f16.
lla::Status attention(const float* q, const float* k, const float* v, float ridge, float* o) {
  lla::ForwardArgs args;
  args.q = lla::dense(q, lla::DType::f32, {B, L, H, D});
  args.k = lla::dense(k, lla::DType::f32, {B, L, H, D});
  args.v = lla::dense(v, lla::DType::f32, {B, L, H, D});
  args.o = lla::dense(o, lla::DType::f32, {B, L, H, D});
  args.ridge = lla::scalar(&ridge);
  args.options.causal = true;
  lla::Workspace workspace(args);
  return lla::forward(args);
}
// README: end

// Mean squared distance of the second half of o, where every query sees more than D + 1 keys, from the linear map of q.
double error(const std::vector<float>& o, const std::vector<float>& q) {
  double sum = 0;
  for (size_t i = o.size() / 2; i < o.size(); ++i) sum += std::pow(o[i] - (0.5 - 2 * q[i]), 2);
  return sum / (static_cast<double>(o.size()) / 2);
}

}  // namespace

int main() {
  std::vector<float> q(B * L * H * D), k(q.size()), v(q.size()), o(q.size());
  for (size_t i = 0; i < q.size(); ++i) {
    k[i] = std::sin(static_cast<float>(i * i % 10007));
    q[i] = std::cos(static_cast<float>(3 * i % 9973));
    v[i] = 0.5f - 2 * k[i];
  }
  double errors[2];
  const float ridges[2] = {1e-5f, std::numeric_limits<float>::infinity()};  // an infinite ridge is softmax attention
  for (int i = 0; i < 2; ++i) {
    if (lla::Status status = attention(q.data(), k.data(), v.data(), ridges[i], o.data()); !status) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      return 1;
    }
    errors[i] = error(o, q);
  }
  std::printf("mean squared error: local linear %.1e, softmax %.1e\n", errors[0], errors[1]);
  return errors[0] < 1e-4 * errors[1] ? 0 : 1;
}
