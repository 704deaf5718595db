#include "train/adamw.hpp"

#include <cmath>
#include <numbers>

#include "tasks/task.hpp"

namespace lla::trained {
namespace {

at::Tensor on(const at::Tensor& like, const std::vector<double>& values) {
  return at::tensor(values, at::kDouble).to(like.device(), at::kFloat);
}

}  // namespace

AdamW::AdamW(at::Tensor start, const at::Tensor& decay_mask, const std::vector<double>& learning_rates,
             const std::vector<double>& multipliers, const AdamWOptions& options)
    : master(std::move(start)), options_(options) {
  first = at::zeros_like(master);
  second = at::zeros_like(master);
  steps = at::zeros({master.size(0)}, master.options().dtype(at::kLong));
  decay_ = decay_mask.to(master.device()) * options.weight_decay;
  rates_ = on(master, learning_rates);
  schedule_ = on(master, multipliers);
  std::vector<double> one, two;
  for (size_t t = 1; t <= multipliers.size(); ++t) {
    one.push_back(1 - std::pow(options.beta1, static_cast<double>(t)));
    two.push_back(std::sqrt(1 - std::pow(options.beta2, static_cast<double>(t))));
  }
  one_ = on(master, one);
  two_ = on(master, two);
}

void AdamW::step(at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  if (options_.clip > 0) {
    const at::Tensor norm = gradient.square().sum(1, /*keepdim=*/true).sqrt();
    gradient.mul_((options_.clip / (norm + 1e-6)).clamp_max(1.0));
  }
  const at::Tensor rate = rates_ * schedule_.index_select(0, steps);
  const at::Tensor one = one_.index_select(0, steps), two = two_.index_select(0, steps);
  steps.add_(1);
  first.lerp_(gradient, 1 - options_.beta1);
  second.mul_(options_.beta2).addcmul_(gradient, gradient, 1 - options_.beta2);
  const at::Tensor root = second.sqrt().div_(two.unsqueeze(1)).add_(options_.epsilon);
  master.sub_(master * rate.unsqueeze(1) * decay_);
  master.sub_((first * (rate / one).unsqueeze(1)).div_(root));
}

void AdamW::keep(const std::vector<int64_t>& runs) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = at::tensor(runs, at::kLong).to(master.device());
  for (at::Tensor* t : {&master, &first, &second, &steps, &rates_}) *t = t->index_select(0, rows);
}

std::vector<double> schedule(const std::string& kind, int64_t steps, int64_t warmup, double final) {
  std::vector<double> values;
  for (int64_t t = 0; t < steps; ++t) {
    const double warm = t < warmup ? static_cast<double>(t + 1) / static_cast<double>(warmup) : 1;
    const double share = static_cast<double>(t - warmup) / static_cast<double>(std::max<int64_t>(1, steps - warmup));
    const double cosine = final + (1 - final) * 0.5 * (1 + std::cos(std::numbers::pi * std::clamp(share, 0.0, 1.0)));
    if (kind == "cosine")
      values.push_back(t < warmup ? warm : cosine);
    else if (kind == "constant")
      values.push_back(warm);
    else
      throw Failure("there is no schedule \"" + kind + "\"; there are cosine and constant");
  }
  return values;
}

}  // namespace lla::trained
