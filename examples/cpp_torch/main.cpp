// Local Linear Attention from C++ with libtorch: learns the ridge of every head so that attention reproduces given
// targets.
#include <ATen/ATen.h>

#include <cstdio>
#include <vector>

#include "lla/torch_autograd.hpp"

int main() {
  at::manual_seed(1);
  const int64_t batch = 2, length = 64, heads = 4, dim = 16;
  const at::Tensor q = at::randn({batch, length, heads, dim}), k = at::randn({batch, length, heads, dim});
  const at::Tensor v = at::randn({batch, length, heads, dim});
  const at::Tensor wanted_ridge = at::tensor({0.02f, 0.1f, 0.5f, 2.0f});
  const at::Tensor target = lla::torch::attention(q, k, v, wanted_ridge);

  at::Tensor log_ridge = at::zeros({heads}).requires_grad_();  // starts at ridge 1
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const at::Tensor o = lla::torch::attention(q, k, v, log_ridge.exp());
    const at::Tensor loss = (o - target).square().mean();
    loss.backward();
    {
      at::NoGradGuard no_grad;
      log_ridge.sub_(log_ridge.grad().sign() * (0.15 * (1 - step / 200.0)));
      log_ridge.grad().zero_();
    }
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.2e -> %.2e; ridge per head, learned (wanted):", first, last);
  for (int64_t h = 0; h < heads; ++h) {
    std::printf(" %.3f (%.3f)", log_ridge.exp()[h].item<double>(), wanted_ridge[h].item<double>());
  }
  std::printf("\n");

  // Gradients by finite differences, in f64.
  const at::Tensor q64 = q.slice(1, 0, 8).to(at::kDouble).requires_grad_();
  const at::Tensor k64 = k.slice(1, 0, 8).to(at::kDouble), v64 = v.slice(1, 0, 8).to(at::kDouble);
  const at::Tensor ridge64 = wanted_ridge.to(at::kDouble), direction = at::randn_like(q64);
  lla::torch::Options exact;
  exact.solver = "direct";
  const auto value = [&](const at::Tensor& at) {
    return lla::torch::attention(at, k64, v64, ridge64, exact).square().sum();
  };
  value(q64).backward();
  const double step = 1e-5;
  const double analytic = (q64.grad() * direction).sum().item<double>();
  const at::Tensor difference = value(q64.detach() + step * direction) - value(q64.detach() - step * direction);
  const double numeric = difference.item<double>() / (2 * step);
  std::printf("directional derivative: %.9f by backward, %.9f by differences\n", analytic, numeric);
  const bool good = last < 1e-2 * first && std::abs(analytic - numeric) < 1e-5 * (1 + std::abs(analytic));
  return good ? 0 : 1;
}
