// Gated linear attention (Yang et al., 2024): a decay for every key dimension. And linear attention, without decay.
//     S_t = diag(a_t) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t
#include <algorithm>

#include "models/chunks.hpp"
#include "models/recurrent.hpp"

namespace lla::trained {
namespace {

constexpr int64_t gate_rank = 16;
constexpr double gate_temperature = 16;  // the logarithm of the decay is logsigmoid / 16
// A decay is never below e^-2 a step (its logit would be -32): over half a chunk that stays within fp32 and bf16.
constexpr double lowest_log_decay = -2;
constexpr int64_t largest_chunk = 36;

class Gla : public Recurrent {
 public:
  Gla(const ModelConfig& config, std::string prefix) : Recurrent(config, std::move(prefix), /*more=*/gate_rank) {}

  void declare(ParameterTable& table) const override {
    Recurrent::declare(table);
    add_matrix(table, "decay", gate_rank, key_width());
    add_vector(table, "decay_bias", key_width(), {Init::zeros}, true);
  }

 protected:
  at::Tensor recur(const Pass& pass, const Columns& in) const override {
    const at::Tensor low = at::bmm(in.more, get(pass, "decay"));
    const at::Tensor logits = wide(low) + wide(get(pass, "decay_bias")).unsqueeze(1);
    const Chunks chunks = make_chunks(pass.length, config_.chunk > 0 ? std::min(config_.chunk, largest_chunk) : 32);
    return from_chunks(
        gated_sum(
            to_chunks(heads(pass, in.q), chunks), to_chunks(heads(pass, in.k), chunks),
            to_chunks(heads(pass, in.v), chunks),
            to_chunks(heads(pass, (at::log_sigmoid(logits) / gate_temperature).clamp_min(lowest_log_decay)), chunks),
            chunks.first(pass.rows)),
        config_.heads, chunks, pass.rows);
  }

 private:
  // log_decay (Z, n, C, Dk). Within a chunk the decay from j to i is split in two factors at the chunk's middle, which
  // keeps both and their products within range.
  static at::Tensor gated_sum(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& log_decay, int64_t first) {
    const int64_t count = k.size(1), size = k.size(2);
    const auto dtype = k.scalar_type();
    const at::Tensor sums = cumulative(log_decay);
    const at::Tensor asked_sums = chunks_from(sums, first), asked_q = chunks_from(q, first);
    const at::Tensor offset = asked_sums - asked_sums.narrow(2, size / 2, 1);
    const at::Tensor late = asked_q * offset.exp().to(dtype);
    const at::Tensor early = chunks_from(k, first) * (-offset).exp().to(dtype);
    const at::Tensor inner = at::matmul(at::matmul(late, early.transpose(2, 3)).tril(), chunks_from(v, first));
    if (count == 1) return inner;

    const int64_t earlier = count - 1;
    const at::Tensor whole = sums.select(2, size - 1);  // (Z, n, Dk)
    const at::Tensor left = k.narrow(1, 0, earlier) * (whole.unsqueeze(2) - sums).narrow(1, 0, earlier).exp().to(dtype);
    const at::Tensor added = at::matmul(left.transpose(2, 3), v.narrow(1, 0, earlier));
    const at::Tensor kept = whole.exp().to(dtype).unsqueeze(-1);
    std::vector<at::Tensor> states;
    // Unbound once: the gradient of a selected chunk would be a copy into zeros of all of them.
    const auto added_in = added.unbind(1), kept_in = kept.unbind(1);
    at::Tensor state = added_in[0];
    for (int64_t chunk = 1; chunk < count; ++chunk) {
      if (chunk > 1) state = at::addcmul(added_in[chunk - 1], state, kept_in[chunk - 1]);
      if (chunk >= first) states.push_back(state);
    }
    if (first == 0) states.insert(states.begin(), at::zeros_like(state));
    return inner + at::matmul(asked_q * asked_sums.exp().to(dtype), at::stack(states, 1));
  }
};

class Linear : public Recurrent {
 public:
  Linear(const ModelConfig& config, std::string prefix) : Recurrent(config, std::move(prefix), 0) {}

 protected:
  at::Tensor recur(const Pass& pass, const Columns& in) const override {
    const Chunks chunks = make_chunks(pass.length, config_.chunk > 0 ? config_.chunk : 64);
    const int64_t first = chunks.first(pass.rows);
    const auto split = [&](const at::Tensor& x) { return to_chunks(heads(pass, x), chunks); };
    const at::Tensor q = split(in.q), k = split(in.k);
    at::Tensor v = split(in.v);
    if (!config_.feature_map) {
      const DecayedSum sum(k, v, at::Tensor(), first);
      return from_chunks(sum(chunks_from(q, first)), config_.heads, chunks, pass.rows);
    }
    // As published (Katharopoulos et al., 2020): positive features, divided by the sum of the weights. A column of ones
    // beside the values carries that sum.
    v = at::cat({v, at::ones_like(v.narrow(3, 0, 1))}, 3);
    // Padded keys have features too, but come after every query that is read.
    const DecayedSum sum(at::elu(k) + 1, v, at::Tensor(), first);
    const at::Tensor both = sum(at::elu(chunks_from(q, first)) + 1);
    const auto parts = both.split_with_sizes({both.size(3) - 1, 1}, 3);
    return from_chunks(parts[0] / (parts[1] + 1e-6), config_.heads, chunks, pass.rows);
  }
};

}  // namespace

std::unique_ptr<Mixing> make_gla(const ModelConfig& config, std::string prefix) {
  return std::make_unique<Gla>(config, std::move(prefix));
}
std::unique_ptr<Mixing> make_linear(const ModelConfig& config, std::string prefix) {
  return std::make_unique<Linear>(config, std::move(prefix));
}

}  // namespace lla::trained
