// MesaNet (von Oswald et al., 2025), with keys and queries of length one: ridge regression on all that was seen,
// decayed.
//     H_t = a_t H_{t-1} + b_t k_t k_t^T,    G_t = a_t G_{t-1} + b_t v_t k_t^T,    o_t = G_t (H_t + diag(lambda))^-1 q_t
// The system is solved by a fixed number of conjugate gradient steps for all positions at once; each applies H_t in its
// chunked form.
#include <cmath>

#include "models/chunks.hpp"
#include "models/recurrent.hpp"

namespace lla::trained {
namespace {

constexpr double ridge_floor = 0.25;

struct System {
  DecayedSum seen;
  at::Tensor ridge;  // (Z, 1, 1, D)
  at::Tensor operator()(const at::Tensor& x) const { return at::addcmul(seen(x), x, ridge); }
};

at::Tensor conjugate_gradients(const System& system, const at::Tensor& right, int64_t iterations) {
  const auto dot = [](const at::Tensor& a, const at::Tensor& b) { return (a * b).sum(-1, /*keepdim=*/true); };
  const double epsilon = right.scalar_type() == at::kDouble ? 1e-15 : 1e-7;
  at::Tensor x = at::zeros_like(right), r = right, p = right, squares = dot(r, r);
  const at::Tensor enough = squares * (epsilon * epsilon);
  for (int64_t i = 0; i < iterations; ++i) {
    const at::Tensor ap = system(p), curvature = dot(p, ap);
    // A row that is solved stays as it is.
    const at::Tensor active = (squares > enough).logical_and_(curvature > 0);
    const at::Tensor step = at::where(active, squares / curvature, 0.0);
    x = at::addcmul(x, p, step);
    r = at::addcmul(r, ap, step, -1);
    const at::Tensor next = dot(r, r);
    p = at::addcmul(r, p, at::where(active, next / squares, 0.0));
    squares = next;
  }
  return x;
}

// x = (H + diag(ridge))^-1 q; its gradient is one more solve, y = (H + diag(ridge))^-1 dx: dq = y, and the rest that of
// -y . (H + diag(ridge)) x with x and y held.
class Solve : public ::torch::autograd::Function<Solve> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& weighted, const at::Tensor& log_decay, const at::Tensor& ridge,
                            int64_t first, int64_t iterations) {
    const at::Tensor x = conjugate_gradients({DecayedSum(k, weighted, log_decay, first), ridge}, q, iterations);
    context->save_for_backward({x, k, weighted, log_decay, ridge});
    context->saved_data["first"] = first;
    context->saved_data["iterations"] = iterations;
    return x;
  }

  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   const ::torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const int64_t first = context->saved_data["first"].toInt();
    const at::Tensor& x = saved[0];
    std::vector<at::Tensor> leaves;
    for (size_t i = 1; i < saved.size(); ++i) leaves.push_back(saved[i].detach().requires_grad_());
    at::AutoGradMode enable(true);
    const System system{DecayedSum(leaves[0], leaves[1], leaves[2], first), leaves[3]};
    at::Tensor y;
    {
      at::NoGradGuard no_grad;
      y = conjugate_gradients(system, grads[0], context->saved_data["iterations"].toInt());
    }
    const auto rest = ::torch::autograd::grad({system(x)}, leaves, {-y});
    return {y, rest[0], rest[1], rest[2], rest[3], at::Tensor(), at::Tensor()};
  }
};

class MesaNet : public Recurrent {
 public:
  MesaNet(const ModelConfig& config, std::string prefix) : Recurrent(config, std::move(prefix), 2 * config.heads) {}

  void declare(ParameterTable& table) const override {
    Recurrent::declare(table);
    add_vector(table, "rate", config_.heads, {Init::log_uniform, 1, 16}, true);
    add_vector(table, "step_bias", config_.heads, {Init::inverse_softplus, 0.001, 0.1}, true);
    // softplus of it is nearly 1, and so is the ridge.
    table.add(prefix_ + "ridge", {key_width()}, {Init::uniform, 0.54, 0.55}, /*decay=*/false, /*full=*/true);
  }

 protected:
  bool activates() const override { return true; }

  at::Tensor recur(const Pass& pass, const Columns& in) const override {
    const int64_t heads_count = config_.heads;
    const Chunks chunks = make_chunks(pass.length, config_.chunk > 0 ? config_.chunk : 64);
    const int64_t first = chunks.first(pass.rows);
    const auto parts = wide(in.more).split(heads_count, 2);
    const auto scalars = [&](const at::Tensor& x) {
      return to_chunks(x.reshape({pass.runs * pass.batch, pass.length, heads_count}), chunks);
    };
    const at::Tensor strength = scalars(parts[0].sigmoid()).unsqueeze(-1);
    const at::Tensor log_decay = scalars(-wide(get(pass, "rate")).exp().unsqueeze(1) *
                                         at::softplus(parts[1] + wide(get(pass, "step_bias")).unsqueeze(1)));
    const at::Tensor ridge = (at::softplus(wide(get(pass, "ridge"))) * (1 - ridge_floor) + ridge_floor)
                                 .view({pass.runs, 1, heads_count, -1})
                                 .expand({-1, pass.batch, -1, -1})
                                 .reshape({pass.runs * pass.batch * heads_count, 1, 1, -1});
    // The solve is in fp32: conjugate gradients in bf16 would stop at its rounding.
    const at::Tensor q = chunks_from(to_chunks(unit_normed(heads(pass, in.q)), chunks), first);
    const at::Tensor k = to_chunks(unit_normed(heads(pass, in.k)), chunks), v = to_chunks(heads(pass, in.v), chunks);
    const at::Tensor wide_k = wide(k);
    const at::Tensor x =
        Solve::apply(wide(q), wide_k, wide_k * strength, log_decay, ridge, first, config_.mesa_iterations);
    const DecayedSum sum(k, v * strength.to(v.scalar_type()), log_decay, first);
    return from_chunks(sum(x.to(k.scalar_type())), heads_count, chunks, pass.rows);
  }
};

}  // namespace

std::unique_ptr<Mixing> make_mesanet(const ModelConfig& config, std::string prefix) {
  return std::make_unique<MesaNet>(config, std::move(prefix));
}

}  // namespace lla::trained
