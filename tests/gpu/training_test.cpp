// A hundred steps of fitting a small regression through forward and backward follow the same run computed in fp64 on
// the CPU. Both see parameters and gradients of o rounded to the tested type; everything between is what is compared.
#include <cmath>

#include "gpu/gpu_test.hpp"

namespace lla::test {
namespace {

class Training : public OnGpu {};
LLA_EACH_CUDA_IMPLEMENTATION(Training);

constexpr int kSteps = 100;
constexpr double kRate = 0.05;

// Gradient descent on q, k, v and the logarithm of the ridge; returns the loss of every step. `pass` gives the
// gradients of the inputs, for the gradient of its o that it asks for.
template <class Pass>
std::vector<double> fit(const Spec& spec, Inputs parameters, const std::vector<double>& target, Pass pass) {
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    Inputs seen = parameters;  // what the implementation's types hold of the parameters
    for (auto* t : {&seen.q, &seen.k, &seen.v}) *t = rounded(*t, spec.dtype);
    for (double& r : seen.ridge) r = rounded(std::exp(r), DType::f32);
    const Backward gradients = pass(seen, [&](const std::vector<double>& out) {
      std::vector<double> g(out.size());
      double loss = 0;
      for (size_t i = 0; i < out.size(); ++i) {
        g[i] = out[i] - target[i];
        loss += 0.5 * g[i] * g[i];
      }
      losses.push_back(loss / static_cast<double>(out.size()));
      return rounded(std::move(g), spec.dtype);
    });
    const auto descend = [](std::vector<double>& p, const std::vector<double>& g) {
      for (size_t i = 0; i < p.size(); ++i) p[i] -= kRate * g[i];
    };
    descend(parameters.q, gradients.dq);
    descend(parameters.k, gradients.dk);
    descend(parameters.v, gradients.dv);
    for (size_t i = 0; i < parameters.ridge.size(); ++i)
      parameters.ridge[i] -= kRate * gradients.dridge[i] * seen.ridge[i];
  }
  return losses;
}

TEST_P(Training, FollowsTheRunInDouble) {
  Spec spec = self_attention(reduced() ? 40 : 96, 64);
  spec.dtype = DType::bf16;
  spec.out_dtype = DType::f32;
  spec.ridge = RidgeShape::token;
  LLA_SKIP_UNLESS_TAKEN(spec);
  Inputs start = make_inputs(spec, data::Kind::randn, 0.5, 12);
  for (double& r : start.ridge) r = std::log(r);
  std::vector<double> target(static_cast<size_t>(spec.rows() * spec.value_dim));
  for (size_t i = 0; i < target.size(); ++i) target[i] = data::normal(12, 77, i);

  const auto got = fit(spec, start, target, [&](Inputs in, auto gradient) {
    const Forward forward = run_forward(spec, in, implementation());
    in.grad_o = gradient(forward.o);
    return run_backward(spec, in, forward.saved, implementation());
  });
  const auto want = fit(spec, start, target, [&](Inputs in, auto gradient) {
    in.grad_o = gradient(oracle_forward(spec, in).o);
    return oracle_backward(spec, in);
  });
  EXPECT_LT(want.back(), 0.5 * want.front()) << "the task is learnt";
  for (int step = 0; step < kSteps; ++step) {
    const size_t i = static_cast<size_t>(step);
    EXPECT_NEAR(got[i], want[i], 0.03 * want[i]) << "step " << step;
  }
}

}  // namespace
}  // namespace lla::test
