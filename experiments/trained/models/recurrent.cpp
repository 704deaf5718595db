#include "models/recurrent.hpp"

namespace lla::trained {

namespace {
constexpr int64_t convolution_taps = 4;
}

void Recurrent::declare(ParameterTable& table) const {
  // Columns: q, k, v, more, gate.
  const int64_t mixed = 2 * key_width() + value_width();
  add_matrix(table, "in", config_.width, mixed + more_ + (config_.output_gate ? value_width() : 0));
  if (config_.short_convolution) {
    table.add(prefix_ + "convolution", {convolution_taps, mixed}, {Init::uniform, -0.5, 0.5}, /*decay=*/false);
  }
  add_vector(table, "out_gain", value_width(), {Init::ones}, false);
  add_matrix(table, "out", value_width(), config_.width);
}

at::Tensor Recurrent::mix(const Pass& pass, const at::Tensor& x, const at::Tensor& gain) const {
  const int64_t mixed = 2 * key_width() + value_width();
  const int64_t gated = config_.output_gate ? value_width() : 0;
  const auto columns = at::bmm(x, with_gain(get(pass, "in"), gain)).split_with_sizes({mixed, more_, gated}, 2);
  at::Tensor qkv = columns[0];
  if (config_.short_convolution) qkv = short_convolved(qkv, get(pass, "convolution"), pass.batch);
  if (config_.feature_map && activates()) qkv = at::silu(qkv);
  const auto parts = qkv.split_with_sizes({key_width(), key_width(), value_width()}, 2);
  at::Tensor o = rms_normed(recur(pass, {parts[0], parts[1], parts[2], columns[1]}));
  o = o.reshape({pass.runs, pass.batch * pass.rows, value_width()});
  if (config_.output_gate) o = o * at::silu(last_rows(columns[2], pass));
  return at::bmm(o, with_gain(get(pass, "out"), get(pass, "out_gain")));
}

}  // namespace lla::trained
