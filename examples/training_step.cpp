// One forward and one backward call, and the check every gradient deserves: does a small step along it pay what it
// says?
#include <lla/lla.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int64_t B = 2, L = 96, H = 4, Hkv = 2, D = 32;

struct Model {
  std::vector<float> q = std::vector<float>(B * L * H * D), k = std::vector<float>(B * L * Hkv * D), v = k;
  std::vector<float> ridge = std::vector<float>(H, 0.5f);  // one per head
  std::vector<float> o = q, saved;

  template <class Args>
  void describe_inputs(Args& args) {
    args.q = lla::dense(q.data(), lla::DType::f32, {B, L, H, D});
    args.k = lla::dense(k.data(), lla::DType::f32, {B, L, Hkv, D});
    args.v = lla::dense(v.data(), lla::DType::f32, {B, L, Hkv, D});
    args.ridge = lla::dense(ridge.data(), lla::DType::f32, {H});
    args.options.tolerance = 1e-6;
  }

  // Half the squared norm of the output; its gradient with respect to o is o.
  lla::Status loss(double& value) {
    lla::ForwardArgs args;
    describe_inputs(args);
    args.o = lla::dense(o.data(), lla::DType::f32, {B, L, H, D});
    lla::ForwardSizes sizes;
    if (lla::Status s = lla::query(args, sizes); !s) return s;
    saved.resize(static_cast<size_t>(sizes.saved_elements));
    args.saved = lla::dense(saved.data(), lla::DType::f32, {sizes.saved_elements});
    lla::Workspace workspace(args);
    if (lla::Status s = lla::forward(args); !s) return s;
    value = 0;
    for (float x : o) value += 0.5 * x * x;
    return {};
  }
};

int fail(const lla::Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}

}  // namespace

int main() {
  Model model;
  for (size_t i = 0; i < model.q.size(); ++i) model.q[i] = std::sin(static_cast<float>(i * i % 10007));
  for (size_t i = 0; i < model.k.size(); ++i) {
    model.k[i] = std::cos(static_cast<float>(i * i % 9973));
    model.v[i] = std::sin(static_cast<float>(5 * i % 9949));
  }
  double before = 0;
  if (lla::Status s = model.loss(before); !s) return fail(s);

  std::vector<float> dq(model.q.size()), dk(model.k.size()), dv(model.v.size()), dridge(model.ridge.size());
  lla::BackwardArgs args;
  model.describe_inputs(args);
  args.saved = lla::dense(model.saved.data(), lla::DType::f32, {static_cast<int64_t>(model.saved.size())});
  args.grad_o = lla::dense(model.o.data(), lla::DType::f32, {B, L, H, D});
  args.dq = lla::dense(dq.data(), lla::DType::f32, {B, L, H, D});
  args.dk = lla::dense(dk.data(), lla::DType::f32, {B, L, Hkv, D});
  args.dv = lla::dense(dv.data(), lla::DType::f32, {B, L, Hkv, D});
  args.dridge = lla::dense(dridge.data(), lla::DType::f32, {H});
  lla::Workspace workspace(args);
  if (lla::Status s = lla::backward(args); !s) return fail(s);

  // Steepest descent in everything at once.
  const float rate = 1e-5f;
  double promised = 0;
  const auto step = [&](std::vector<float>& parameter, const std::vector<float>& gradient) {
    for (size_t i = 0; i < parameter.size(); ++i) {
      parameter[i] -= rate * gradient[i];
      promised -= static_cast<double>(rate) * gradient[i] * gradient[i];
    }
  };
  step(model.q, dq);
  step(model.k, dk);
  step(model.v, dv);
  step(model.ridge, dridge);

  double after = 0;
  if (lla::Status s = model.loss(after); !s) return fail(s);
  std::printf("loss %.4f -> %.4f: changed by %.5f, the gradient promised %.5f\n", before, after, after - before,
              promised);
  return std::abs((after - before) / promised - 1) < 0.05 ? 0 : 1;
}
