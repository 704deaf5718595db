// Mamba-2 (Dao and Gu, 2024), one group: B and C are shared by the heads.
//     H_t = exp(d_t A) H_{t-1} + d_t B_t x_t^T,    y_t = H_t^T C_t + D x_t,    d_t = softplus(.)
// then RMS norm of y * silu(z). Not expanded: at equal width that gives the parameters of attention, and heads and
// state of the others' size.
#include "models/blocks.hpp"
#include "models/chunks.hpp"

namespace lla::trained {
namespace {

constexpr int64_t convolution_taps = 4;

class Mamba2 : public Mixing {
 public:
  using Mixing::Mixing;

  void declare(ParameterTable& table) const override {
    // Columns: x, B, C, z, step size.
    const int64_t mixed = config_.width + 2 * config_.state_width;
    add_matrix(table, "in", config_.width, mixed + config_.width + config_.heads);
    if (config_.short_convolution) {
      table.add(prefix_ + "convolution", {convolution_taps, mixed}, {Init::uniform, -0.5, 0.5}, /*decay=*/false);
    }
    add_vector(table, "rate", config_.heads, {Init::log_uniform, 1, 16}, true);
    add_vector(table, "step_bias", config_.heads, {Init::inverse_softplus, 0.001, 0.1}, true);
    add_vector(table, "skip", config_.heads, {Init::ones}, false);
    add_vector(table, "out_gain", config_.width, {Init::ones}, false);
    add_matrix(table, "out", config_.width, config_.width);
  }

  at::Tensor mix(const Pass& pass, const at::Tensor& x, const at::Tensor& gain) const override {
    const int64_t width = config_.width, states = config_.state_width, heads = config_.heads;
    const int64_t sequences = pass.runs * pass.batch;
    const auto columns =
        at::bmm(x, with_gain(get(pass, "in"), gain)).split_with_sizes({width + 2 * states, width, heads}, 2);
    at::Tensor xbc = columns[0];
    if (config_.short_convolution) xbc = short_convolved(xbc, get(pass, "convolution"), pass.batch);
    if (config_.feature_map) xbc = at::silu(xbc);
    const auto parts = xbc.split_with_sizes({width, states, states}, 2);
    const at::Tensor step = at::softplus(wide(columns[2]) + wide(get(pass, "step_bias")).unsqueeze(1));
    const at::Tensor log_decay = step * -wide(get(pass, "rate")).exp().unsqueeze(1);

    const Chunks chunks = make_chunks(pass.length, config_.chunk > 0 ? config_.chunk : 64);
    const int64_t first = chunks.first(pass.rows);
    const auto shared = [&](const at::Tensor& y) {
      return to_chunks(y.reshape({sequences, pass.length, 1, states}).expand({-1, -1, heads, -1}), chunks);
    };
    const auto scalars = [&](const at::Tensor& y) {
      return to_chunks(y.reshape({sequences, pass.length, heads}), chunks);
    };
    const at::Tensor values = parts[0].reshape({sequences, pass.length, heads, head_width()});
    const at::Tensor v = to_chunks(values, chunks) * scalars(step).to(values.scalar_type()).unsqueeze(-1);
    const DecayedSum sum(shared(parts[1]), v, scalars(log_decay), first);
    const at::Tensor y = from_chunks(sum(chunks_from(shared(parts[2]), first)), heads, chunks, pass.rows);

    const auto rows = [&](const at::Tensor& t) { return t.reshape({pass.runs, pass.batch * pass.rows, heads, -1}); };
    const at::Tensor skipped =
        at::addcmul(rows(y), rows(last_rows(parts[0], pass)), get(pass, "skip").view({pass.runs, 1, heads, 1}));
    const at::Tensor o = rms_normed(skipped.flatten(2) * at::silu(last_rows(columns[1], pass)));
    return at::bmm(o, with_gain(get(pass, "out"), get(pass, "out_gain")));
  }
};

}  // namespace

std::unique_ptr<Mixing> make_mamba2(const ModelConfig& config, std::string prefix) {
  return std::make_unique<Mamba2>(config, std::move(prefix));
}

}  // namespace lla::trained
