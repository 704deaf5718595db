// The mixers that keep every key: Local Linear Attention, softmax attention, and Parallax (a learned x instead of LLA's
// solve). Runs are folded into the batch: an attention operator has no weights.
#include <cmath>
#include <limits>

#include "models/blocks.hpp"
#include "models/fused.hpp"

namespace lla::trained {
namespace {

using ::torch::autograd::variable_list;

// Halves of each head rotated against each other; x (R, B, L, H, D), the last position being length - 1.
at::Tensor rotated(const at::Tensor& x, int64_t length, double theta) {
  const int64_t rows = x.size(2), half = x.size(4) / 2;
  const auto options = x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor rates = at::exp(at::arange(half, options) * (-std::log(theta) / static_cast<double>(half)));
  const at::Tensor angles = at::arange(length - rows, length, options).unsqueeze(1) * rates;
  const at::Tensor cos = angles.cos().to(x.scalar_type()).unsqueeze(1),
                   sin = angles.sin().to(x.scalar_type()).unsqueeze(1);
  const auto parts = x.split(half, -1);
  return at::cat({parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin}, -1);
}

// Products of bf16 operands in fp32 where there is such a kernel.
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cuda() && a.scalar_type() == at::kBFloat16 ? at::bmm(a, b, at::kFloat) : wide(at::bmm(a, b));
}

// 1 / sqrt(D): on the queries where it is a power of two, so that nothing is rounded and the scores, many times as many,
// need no pass of their own.
struct Scale {
  double value;
  bool exact;
  explicit Scale(int64_t width) : value(1 / std::sqrt(static_cast<double>(width))) {
    int exponent = 0;
    exact = std::frexp(value, &exponent) == 0.5;
  }
  at::Tensor of_queries(const at::Tensor& q) const { return exact ? q * value : q; }
  at::Tensor of_scores(at::Tensor scores) const { return exact ? scores : scores.mul_(value); }
};

// Softmax attention for a few queries at the end, head by head and with all weights in memory: a flash kernel would
// work on blocks of 128 queries of which 16 are there. q (N, rows, H, D), k and v (N, L, H, D).
class FewQueries : public ::torch::autograd::Function<FewQueries> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v) {
    const int64_t rows = q.size(1), length = k.size(1);
    const Scale scale(q.size(3));
    variable_list outputs, saved{scale.of_queries(q), k, v};
    const auto full = q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const at::Tensor unseen =  // of the last keys: those before them are seen by every query
        at::full({rows, rows}, -std::numeric_limits<double>::infinity(), full).triu(1);
    for (int64_t head = 0; head < q.size(2); ++head) {
      const at::Tensor scores =
          scale.of_scores(wide_product(saved[0].select(2, head), k.select(2, head).transpose(1, 2)));
      scores.narrow(2, length - rows, rows).add_(unseen);
      const at::Tensor weights = at::softmax(scores, -1);
      saved.push_back(weights);
      outputs.push_back(at::bmm(weights.to(v.scalar_type()), v.select(2, head)));
    }
    context->save_for_backward(saved);
    return at::stack(outputs, 2);
  }

  static variable_list backward(::torch::autograd::AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const Scale scale(q.size(3));
    variable_list dq, dk, dv;
    for (int64_t head = 0; head < q.size(2); ++head) {
      const at::Tensor slope = grads[0].select(2, head), &weights = saved[static_cast<size_t>(3 + head)];
      const at::Tensor dweights = wide_product(slope, v.select(2, head).transpose(1, 2));
      const at::Tensor dscores =
          scale.of_scores(at::_softmax_backward_data(dweights, weights, -1, weights.scalar_type())).to(q.scalar_type());
      dq.push_back(at::bmm(dscores, k.select(2, head)));
      dk.push_back(at::bmm(dscores.transpose(1, 2), q.select(2, head)));
      dv.push_back(at::bmm(weights.to(v.scalar_type()).transpose(1, 2), slope));
    }
    return {scale.of_queries(at::stack(dq, 2)), at::stack(dk, 2), at::stack(dv, 2)};
  }
};

// q (N, rows, H, D), k and v (N, L, H, D): query i sees the keys up to L - rows + i.
at::Tensor softmax_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (q.size(1) != k.size(1)) return FewQueries::apply(q, k, v);
  const auto heads_first = [](const at::Tensor& x) { return x.transpose(1, 2); };
  return heads_first(
      at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), {}, 0, /*is_causal=*/true));
}

class Attention : public Mixing {
 public:
  using Mixing::Mixing;

  void declare(ParameterTable& table) const override {
    // Columns: q, what goes with each query (the logits of lambda, or x), k, v.
    add_matrix(table, "in", config_.width, 3 * config_.width + extra());
    if (config_.mixer == Mixer::lla && config_.ridge_bias)
      add_vector(table, "ridge_bias", extra(), {Init::zeros}, false);
    if (config_.qk_norm) {
      add_vector(table, "q_gain", head_width(), {Init::ones}, false);
      add_vector(table, "k_gain", head_width(), {Init::ones}, false);
    }
    add_matrix(table, "out", config_.width, config_.width);
  }

  at::Tensor mix(const Pass& pass, const at::Tensor& x, const at::Tensor& gain) const override {
    const int64_t width = config_.width;
    const at::Tensor in = with_gain(get(pass, "in"), gain);
    at::Tensor q, more, k, v;
    if (pass.rows == pass.length) {
      const auto parts = at::bmm(x, in).split_with_sizes({width, extra(), width, width}, 2);
      q = parts[0], more = parts[1], k = parts[2], v = parts[3];
    } else {
      const auto sides = in.split_with_sizes({width + extra(), 2 * width}, 2);
      const auto queries = at::bmm(last_rows(x, pass), sides[0]).split_with_sizes({width, extra()}, 2);
      const auto keys = at::bmm(x, sides[1]).split(width, 2);
      q = queries[0], more = queries[1], k = keys[0], v = keys[1];
    }
    q = headed(pass, q, pass.rows, "q_gain");
    k = headed(pass, k, pass.length, "k_gain");
    v = heads(v, pass.runs * pass.batch, pass.length);
    const at::Tensor o = attend(pass, q, k, v, more);
    return at::bmm(o.reshape({pass.runs, pass.batch * pass.rows, width}), get(pass, "out"));
  }

 private:
  // Columns that go with each query beside q.
  int64_t extra() const {
    if (config_.mixer == Mixer::parallax) return config_.width;
    if (config_.mixer == Mixer::softmax || config_.ridge == Ridge::infinite) return 0;
    return config_.ridge == Ridge::per_head ? config_.heads : head_width();
  }

  // (R, B * rows, H * D) to (R * B, rows, H, D), a view.
  at::Tensor heads(const at::Tensor& x, int64_t sequences, int64_t rows) const {
    return x.view({sequences, rows, config_.heads, head_width()});
  }

  at::Tensor headed(const Pass& pass, const at::Tensor& x, int64_t rows, const char* gain) const {
    if (!config_.qk_norm && config_.positions != Positions::rope) return heads(x, pass.runs * pass.batch, rows);
    at::Tensor y = x.view({pass.runs, pass.batch, rows, config_.heads, head_width()});
    if (config_.qk_norm) y = rms_normed(y) * get(pass, gain).view({pass.runs, 1, 1, 1, head_width()});
    if (config_.positions == Positions::rope) y = rotated(y, pass.length, config_.rope_theta);
    return y.flatten(0, 1);
  }

  at::Tensor attend(const Pass& pass, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& more) const {
    const int64_t sequences = pass.runs * pass.batch;
    if (config_.mixer == Mixer::softmax) return softmax_attention(q, k, v);
    if (config_.mixer == Mixer::parallax) {
      return lla::torch::parallax_attention(q, k, v, heads(more, sequences, pass.rows));
    }
    lla::torch::Options options;
    if (pass.counts != nullptr) {
      options.info = lla::torch::make_row_info();
      options.backward_info = lla::torch::make_row_info();
      pass.counts->layers.push_back({options.info, options.backward_info});
    }
    return lla::torch::attention(q, k, v, ridge(pass, more), options);
  }

  // lambda by query, head and dimension, relative to weights that sum to one.
  at::Tensor ridge(const Pass& pass, const at::Tensor& logits) const {
    const auto full = pass.weights.compute() == at::kDouble ? at::kDouble : at::kFloat;
    if (config_.ridge == Ridge::infinite) {
      return at::full({}, std::numeric_limits<double>::infinity(), get(pass, "out").options().dtype(full));
    }
    const int64_t sequences = pass.runs * pass.batch;
    const bool bounded = config_.ridge_form == RidgeForm::sigmoid;
    if (bounded && config_.ridge == Ridge::per_dimension && !config_.ridge_bias) {
      return shared_ridge(logits.view({sequences, pass.rows, head_width()}), config_.heads, config_.ridge_min);
    }
    at::Tensor lambda = logits.to(full);
    if (config_.ridge_bias) lambda = lambda + get(pass, "ridge_bias").to(full).unsqueeze(1);
    lambda = bounded ? lambda.sigmoid() : at::softplus(lambda);
    if (config_.ridge_min > 0) lambda = lambda * (1 - config_.ridge_min) + config_.ridge_min;
    if (config_.ridge == Ridge::per_head) return lambda.reshape({sequences, pass.rows, config_.heads});
    return lambda.reshape({sequences, pass.rows, 1, head_width()}).expand({-1, -1, config_.heads, -1});
  }
};

}  // namespace

std::unique_ptr<Mixing> make_attention(const ModelConfig& config, std::string prefix) {
  return std::make_unique<Attention>(config, std::move(prefix));
}

}  // namespace lla::trained
