#include "recurrences.hpp"

#include <cmath>
#include <vector>

namespace lla::trained {
namespace {

using at::Tensor;

Tensor unit(const Tensor& x) { return x / (x.pow(2).sum(-1, true) + 1e-6).sqrt(); }
Tensor rms(const Tensor& x) { return x / (x.pow(2).mean(-1, true) + 1e-5).sqrt(); }
Tensor swish(const Tensor& x) { return x / (1 + (-x).exp()); }
Tensor rank_one(const Tensor& a, const Tensor& b) { return a.unsqueeze(1) * b.unsqueeze(0); }
Tensor times(const Tensor& row, const Tensor& matrix) { return (row.unsqueeze(1) * matrix).sum(0); }  // row . matrix

// kernel (taps, c): kernel[j] weighs the value j back.
Tensor convolve(const Tensor& x, const Tensor& kernel) {
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < x.size(0); ++t) {
    Tensor sum = x[t] * kernel[0];
    for (int64_t j = 1; j < kernel.size(0) && j <= t; ++j) sum = sum + x[t - j] * kernel[j];
    rows.push_back(sum);
  }
  return at::stack(rows);
}

// One head of the attention models; the last word on what LLA is: the weighted ridge regression solved as such.
Tensor attend(const ModelConfig& config, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& more) {
  const auto width = static_cast<double>(q.size(1));
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < q.size(0); ++t) {
    const Tensor keys = k.narrow(0, 0, t + 1), values = v.narrow(0, 0, t + 1);
    const Tensor p = at::softmax((keys * q[t]).sum(1) / std::sqrt(width), 0);
    if (config.mixer == Mixer::softmax || config.ridge == Ridge::infinite) {
      rows.push_back(times(p, values));
      continue;
    }
    const Tensor centered = keys - times(p, keys);
    Tensor x;
    if (config.mixer == Mixer::parallax) {
      x = more[t];
    } else {
      const Tensor a = at::matmul(centered.t(), p.unsqueeze(1) * centered) + at::diag(more[t].expand({q.size(1)}));
      x = at::linalg_solve(a, q[t] - times(p, keys));
    }
    rows.push_back(times(p * (1 + (centered * x).sum(1)), values));
  }
  return at::stack(rows);
}

Tensor attention(const ModelConfig& config, const Lookup& weights, const Tensor& x) {
  const int64_t width = config.width, head = width / config.heads;
  const Tensor columns = at::matmul(x, weights("in"));
  const int64_t extra = columns.size(1) - 3 * width;
  const Tensor q = columns.narrow(1, 0, width), k = columns.narrow(1, width + extra, width),
               v = columns.narrow(1, 2 * width + extra, width);
  Tensor more = columns.narrow(1, width, extra);
  if (config.mixer == Mixer::lla && extra > 0) {
    if (config.ridge_bias) more = more + weights("ridge_bias");
    const Tensor lambda = config.ridge_form == RidgeForm::sigmoid ? 1 / (1 + (-more).exp()) : at::log1p(more.exp());
    more = config.ridge_min + (1 - config.ridge_min) * lambda;
  }
  std::vector<Tensor> heads;
  for (int64_t h = 0; h < config.heads; ++h) {
    const auto part = [&](const Tensor& y) {
      const Tensor own = y.narrow(1, h * head, head);
      if (&y == &v) return own;
      Tensor turned = own;
      if (config.qk_norm) turned = rms(own) * weights(&y == &q ? "q_gain" : "k_gain");
      if (config.positions != Positions::rope) return turned;
      std::vector<Tensor> rows;
      for (int64_t t = 0; t < x.size(0); ++t) {
        std::vector<Tensor> values(static_cast<size_t>(head));
        for (int64_t i = 0; i < head / 2; ++i) {
          const double angle = static_cast<double>(t) *
                               std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(head));
          const Tensor a = turned[t][i], b = turned[t][i + head / 2];
          values[static_cast<size_t>(i)] = a * std::cos(angle) - b * std::sin(angle);
          values[static_cast<size_t>(i + head / 2)] = b * std::cos(angle) + a * std::sin(angle);
        }
        rows.push_back(at::stack(values));
      }
      return at::stack(rows);
    };
    Tensor own = more;
    if (config.mixer == Mixer::parallax) own = more.narrow(1, h * head, head);
    if (config.mixer == Mixer::lla && config.ridge == Ridge::per_head) own = more.narrow(1, h, 1);
    heads.push_back(attend(config, part(q), part(k), part(v), own));
  }
  return at::matmul(at::cat(heads, 1), weights("out"));
}

Tensor mamba2(const ModelConfig& config, const Lookup& weights, const Tensor& x) {
  const int64_t width = config.width, states = config.state_width, head = width / config.heads;
  const Tensor columns = at::matmul(x, weights("in"));
  Tensor xbc = columns.narrow(1, 0, width + 2 * states);
  if (config.short_convolution) xbc = convolve(xbc, weights("convolution"));
  if (config.feature_map) xbc = swish(xbc);
  const Tensor z = columns.narrow(1, width + 2 * states, width);
  const Tensor step = at::log1p((columns.narrow(1, 2 * width + 2 * states, config.heads) + weights("step_bias")).exp());
  std::vector<Tensor> heads;
  for (int64_t h = 0; h < config.heads; ++h) {
    Tensor state = at::zeros({states, head}, x.options());
    std::vector<Tensor> rows;
    for (int64_t t = 0; t < x.size(0); ++t) {
      const Tensor u = xbc[t].narrow(0, h * head, head), b = xbc[t].narrow(0, width, states),
                   c = xbc[t].narrow(0, width + states, states), dt = step[t][h];
      state = (-dt * weights("rate")[h].exp()).exp() * state + dt * rank_one(b, u);
      rows.push_back(times(c, state) + weights("skip")[h] * u);
    }
    heads.push_back(at::stack(rows));
  }
  const Tensor y = rms(at::cat(heads, 1) * swish(z)) * weights("out_gain");
  return at::matmul(y, weights("out"));
}

Tensor hyena(const ModelConfig& config, const Lookup& weights, const Tensor& x) {
  const int64_t width = config.width, length = x.size(0);
  Tensor columns = at::matmul(x, weights("in"));
  if (config.short_convolution) columns = convolve(columns, weights("convolution"));
  const Tensor u = columns.narrow(1, 0, width) * columns.narrow(1, width, width),
               gate = columns.narrow(1, 2 * width, width);
  std::vector<Tensor> filter;
  for (int64_t t = 0; t < length; ++t) {
    const double place = static_cast<double>(t) / static_cast<double>(config.max_length);
    std::vector<double> features{place};
    for (int band = 1; band <= 8; ++band) features.push_back(std::cos(2 * M_PI * place * band));
    for (int band = 1; band <= 8; ++band) features.push_back(std::sin(2 * M_PI * place * band));
    Tensor h = at::tensor(features, x.options());
    h = at::sin(10 * (times(h, weights("filter1")) + weights("filter1_bias")));
    h = at::sin(10 * (times(h, weights("filter2")) + weights("filter2_bias")));
    h = times(h, weights("filter3"));
    const double rate = -std::log(0.01);
    filter.push_back(h * at::exp(-place * at::linspace(rate / 1.5, rate / 0.3, width, x.options())));
  }
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < length; ++t) {
    Tensor sum = u[t] * weights("skip");
    for (int64_t j = 0; j <= t; ++j) sum = sum + filter[static_cast<size_t>(t - j)] * u[j];
    rows.push_back(sum * gate[t]);
  }
  return at::matmul(at::stack(rows), weights("out"));
}

// One head of the models with a recurrent state over keys and values: columns of q, k, v and the `more` of that model.
Tensor recur(const ModelConfig& config, const Lookup& weights, int64_t h, const Tensor& q, const Tensor& k,
             const Tensor& v, const Tensor& more) {
  const auto options = q.options();
  const int64_t dk = q.size(1), dv = v.size(1), length = q.size(0);
  std::vector<Tensor> rows;
  Tensor state = at::zeros({dk, dv}, options), squares = at::zeros({dk, dk}, options), sum = at::zeros({dk}, options);
  for (int64_t t = 0; t < length; ++t) {
    if (config.mixer == Mixer::linear) {
      const auto feature = [&](const Tensor& y) { return config.feature_map ? at::where(y > 0, y + 1, y.exp()) : y; };
      const Tensor fq = feature(q[t]), fk = feature(k[t]);
      state = state + rank_one(fk, v[t]);
      sum = sum + fk;
      rows.push_back(config.feature_map ? times(fq, state) / ((fq * sum).sum() + 1e-6) : times(fq, state));
      continue;
    }
    if (config.mixer == Mixer::gla) {
      const Tensor logits = times(more[t], weights("decay")) + weights("decay_bias");
      const Tensor decay = (1 / (1 + (-logits).exp())).narrow(0, h * dk, dk).pow(1.0 / 16).clamp_min(std::exp(-2.0));
      state = decay.unsqueeze(1) * state + rank_one(k[t], v[t]);
      rows.push_back(times(q[t], state));
      continue;
    }
    const Tensor strength = 1 / (1 + (-more[t][h]).exp());
    const Tensor decay =
        (-weights("rate")[h].exp() * at::log1p((more[t][config.heads + h] + weights("step_bias")[h]).exp())).exp();
    const Tensor query = unit(q[t]), key = unit(k[t]);
    if (config.mixer == Mixer::gated_deltanet) {
      state = decay * state;
      state = state + rank_one(key, strength * (v[t] - times(key, state)));
      rows.push_back(times(query, state));
      continue;
    }
    state = decay * state + strength * rank_one(key, v[t]);
    squares = decay * squares + strength * rank_one(key, key);
    const Tensor ridge = (at::log1p(weights("ridge").exp()) * 0.75 + 0.25).narrow(0, h * dk, dk);
    rows.push_back(times(at::linalg_solve(squares + at::diag(ridge), query), state));
  }
  return at::stack(rows);
}

Tensor recurrent(const ModelConfig& config, const Lookup& weights, const Tensor& x) {
  const auto share = [&](double ratio) { return static_cast<int64_t>(ratio * static_cast<double>(config.width)); };
  const int64_t keys = share(config.key_ratio), values = share(config.value_ratio), mixed = 2 * keys + values;
  const int64_t dk = keys / config.heads, dv = values / config.heads;
  const Tensor columns = at::matmul(x, weights("in"));
  const int64_t gated = config.output_gate ? values : 0, more = columns.size(1) - mixed - gated;
  Tensor qkv = columns.narrow(1, 0, mixed);
  if (config.short_convolution) qkv = convolve(qkv, weights("convolution"));
  const bool activates = config.mixer == Mixer::gated_deltanet || config.mixer == Mixer::mesanet;
  if (config.feature_map && activates) qkv = swish(qkv);
  std::vector<Tensor> heads;
  for (int64_t h = 0; h < config.heads; ++h) {
    heads.push_back(rms(recur(config, weights, h, qkv.narrow(1, h * dk, dk), qkv.narrow(1, keys + h * dk, dk),
                              qkv.narrow(1, 2 * keys + h * dv, dv), columns.narrow(1, mixed, more))));
  }
  Tensor o = at::cat(heads, 1) * weights("out_gain");
  if (config.output_gate) o = o * swish(columns.narrow(1, mixed + more, values));
  return at::matmul(o, weights("out"));
}

}  // namespace

at::Tensor step_by_step(const ModelConfig& config, const Lookup& weights, const at::Tensor& x) {
  switch (config.mixer) {
    case Mixer::lla:
    case Mixer::softmax:
    case Mixer::parallax: return attention(config, weights, x);
    case Mixer::mamba2: return mamba2(config, weights, x);
    case Mixer::hyena: return hyena(config, weights, x);
    default: return recurrent(config, weights, x);
  }
}

}  // namespace lla::trained
