// Gated DeltaNet (Yang et al., 2025), with keys and queries of length one:
//     S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,    o_t = S_t^T q_t
// In a chunk with state S before it and decays G_i = a_1 ... a_i, the written values u_i (S_t = a_t S_{t-1} + k_t
// u_t^T) solve (I + N) U = diag(b) V - diag(b G) K S,  N_ij = b_i G_i / G_j k_i.k_j for j < i: one triangular inverse a
// chunk.
#include "models/chunks.hpp"
#include "models/recurrent.hpp"

namespace lla::trained {
namespace {

class GatedDeltaNet : public Recurrent {
 public:
  GatedDeltaNet(const ModelConfig& config, std::string prefix)
      : Recurrent(config, std::move(prefix), 2 * config.heads) {}

  void declare(ParameterTable& table) const override {
    Recurrent::declare(table);
    add_vector(table, "rate", config_.heads, {Init::log_uniform, 0.01, 16}, true);
    add_vector(table, "step_bias", config_.heads, {Init::inverse_softplus, 0.001, 0.1}, true);
  }

 protected:
  bool activates() const override { return true; }

  at::Tensor recur(const Pass& pass, const Columns& in) const override {
    const Chunks chunks = make_chunks(pass.length, config_.chunk > 0 ? config_.chunk : 64);
    const auto parts = wide(in.more).split(config_.heads, 2);
    const at::Tensor strength = parts[0].sigmoid();
    const at::Tensor log_decay = -wide(get(pass, "rate")).exp().unsqueeze(1) *
                                 at::softplus(parts[1] + wide(get(pass, "step_bias")).unsqueeze(1));
    const auto scalars = [&](const at::Tensor& x) {
      return to_chunks(x.reshape({pass.runs * pass.batch, pass.length, config_.heads}), chunks);
    };
    const at::Tensor o = delta_rule(
        to_chunks(unit_normed(heads(pass, in.q)), chunks), to_chunks(unit_normed(heads(pass, in.k)), chunks),
        to_chunks(heads(pass, in.v), chunks), scalars(strength), scalars(log_decay), chunks.first(pass.rows));
    return from_chunks(o, config_.heads, chunks, pass.rows);
  }

 private:
  static at::Tensor delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& strength, const at::Tensor& log_decay, int64_t first) {
    const int64_t count = k.size(1), size = k.size(2);
    const auto dtype = k.scalar_type();
    const at::Tensor sums = cumulative(log_decay);
    const at::Tensor lower = decayed_scores(at::matmul(k, k.transpose(2, 3)), sums, /*strict=*/true);
    // The inverse in fp32; N is its argument.
    const at::Tensor inverse =
        (unit_lower_inverse(lower * strength.unsqueeze(-1), dtype) * strength.unsqueeze(-2)).to(dtype);
    const at::Tensor written = at::matmul(inverse, v);  // with no state before the chunk
    const at::Tensor entering = sums.exp().to(dtype).unsqueeze(-1);
    at::Tensor u = written, states;
    if (count > 1) {
      const at::Tensor removed = at::matmul(inverse, k * entering);  // times the state before the chunk
      const at::Tensor whole = sums.select(2, size - 1);
      const at::Tensor leaving = (k * (whole.unsqueeze(-1) - sums).exp().to(dtype).unsqueeze(-1)).transpose(2, 3);
      const at::Tensor kept = whole.exp().to(dtype).unsqueeze(-1).unsqueeze(-1);
      // Unbound once: the gradient of a selected chunk would be a copy into zeros of all of them.
      const auto written_in = written.unbind(1), removed_in = removed.unbind(1), leaving_in = leaving.unbind(1),
                 kept_in = kept.unbind(1);
      std::vector<at::Tensor> us, before;
      at::Tensor state = at::zeros({k.size(0), k.size(3), v.size(3)}, k.options());
      for (int64_t chunk = 0; chunk < count; ++chunk) {
        const bool last = chunk + 1 == count;
        const at::Tensor here = chunk == 0 ? written_in[0]
                                           : at::baddbmm(written_in[chunk], removed_in[chunk], state,
                                                         /*beta=*/1, /*alpha=*/-1);
        if (chunk >= first) us.push_back(here), before.push_back(state);
        if (last) break;
        const at::Tensor scaled = chunk == 0 ? state : state * kept_in[chunk];
        state = at::baddbmm(scaled, leaving_in[chunk], here);
      }
      u = at::stack(us, 1);
      states = at::stack(before, 1);
    }
    const at::Tensor asked_q = chunks_from(q, first);
    const at::Tensor scores =
        decayed_scores(at::matmul(asked_q, chunks_from(k, first).transpose(2, 3)), chunks_from(sums, first));
    const at::Tensor inner = at::matmul(scores, u);
    if (count == 1) return inner;
    return at::addcmul(inner, at::matmul(asked_q, states), chunks_from(entering, first));
  }
};

}  // namespace

std::unique_ptr<Mixing> make_gated_deltanet(const ModelConfig& config, std::string prefix) {
  return std::make_unique<GatedDeltaNet>(config, std::move(prefix));
}

}  // namespace lla::trained
