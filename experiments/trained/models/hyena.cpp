// Hyena (Poli et al., 2023), order 2: two gates and one long convolution whose filter is a small network of the
// position.
//     y = x2 * (h (*) (x1 * v) + bias x1 * v)
// The convolution is a product with the filter's Toeplitz matrix, one for each channel: at these lengths a matrix
// product beats transforms, and its gradient is the same kind of product.
#include <cmath>

#include "models/blocks.hpp"

namespace lla::trained {
namespace {

constexpr int64_t bands = 8, convolution_taps = 3;
constexpr double frequency = 10, decay_target = 1e-2, fastest = 0.3, slowest = 1.5;

class Hyena : public Mixing {
 public:
  using Mixing::Mixing;

  void declare(ParameterTable& table) const override {
    const int64_t hidden = config_.hyena_filter_width;
    add_matrix(table, "in", config_.width, 3 * config_.width);  // v, x1, x2
    if (config_.short_convolution) {
      table.add(prefix_ + "convolution", {convolution_taps, 3 * config_.width}, {Init::uniform, -0.5, 0.5}, false);
    }
    const auto add_layer = [&](const char* name, int64_t in, int64_t out) {
      table.add(prefix_ + name, {in, out}, {Init::normal, 1 / std::sqrt(3.0 * static_cast<double>(in))},
                /*decay=*/false, /*full=*/true);
    };
    add_layer("filter1", 1 + 2 * bands, hidden);
    add_vector(table, "filter1_bias", hidden, {Init::uniform, -0.2, 0.2}, true);
    add_layer("filter2", hidden, hidden);
    add_vector(table, "filter2_bias", hidden, {Init::uniform, -0.2, 0.2}, true);
    add_layer("filter3", hidden, config_.width);
    add_vector(table, "skip", config_.width, {Init::normal, 1}, false);
    add_matrix(table, "out", config_.width, config_.width);
  }

  at::Tensor mix(const Pass& pass, const at::Tensor& x, const at::Tensor& gain) const override {
    at::Tensor columns = at::bmm(x, with_gain(get(pass, "in"), gain));
    if (config_.short_convolution) columns = short_convolved(columns, get(pass, "convolution"), pass.batch);
    const auto parts = columns.split(config_.width, 2);
    const at::Tensor u = parts[0] * parts[1];
    const at::Tensor skipped = last_rows(u, pass) * get(pass, "skip").unsqueeze(1);
    const at::Tensor y = (convolved(pass, u) + skipped) * last_rows(parts[2], pass);
    return at::bmm(y, get(pass, "out"));
  }

 private:
  // (R, L, width): the filter at the distances 0 ... L - 1.
  at::Tensor filter(const Pass& pass) const {
    const at::Tensor first = wide(get(pass, "filter1"));
    const auto options = first.options();
    const at::Tensor t = at::arange(pass.length, options) / static_cast<double>(config_.max_length);
    const at::Tensor angles = t.unsqueeze(1) * (2 * M_PI * at::arange(1, bands + 1, options));
    const at::Tensor places = at::cat({t.unsqueeze(1), angles.cos(), angles.sin()}, 1);
    const auto layer = [&](const at::Tensor& input, const char* name, const char* bias) {
      return at::sin(frequency * (at::matmul(input, wide(get(pass, name))) + wide(get(pass, bias)).unsqueeze(1)));
    };
    at::Tensor h = layer(places, "filter1", "filter1_bias");
    h = layer(h, "filter2", "filter2_bias");
    h = at::matmul(h, wide(get(pass, "filter3")));
    // Channels forget at different rates, between a factor decay_target over `fastest` and over `slowest` of the
    // length.
    const double rate = -std::log(decay_target);
    const at::Tensor rates = at::linspace(rate / slowest, rate / fastest, config_.width, options);
    return h * at::exp(-t.unsqueeze(1) * rates);
  }

  // u (R, B * L, width) to (R, B * rows, width).
  at::Tensor convolved(const Pass& pass, const at::Tensor& u) const {
    const int64_t length = pass.length, rows = pass.rows;
    // h[i - j] for the last rows i and all j, zero where j > i: windows of the reversed filter, zeros after it.
    const at::Tensor reversed = filter(pass).to(u.scalar_type()).transpose(1, 2).flip({2});  // h[L-1] ... h[0]
    const at::Tensor padded = at::constant_pad_nd(reversed, {0, rows - 1});
    // Window w holds h[L - 1 - w - j]: it belongs to i = L - 1 - w.
    const at::Tensor toeplitz = padded.unfold(2, length, 1).flip({2}).flatten(0, 1);  // (R * width, rows, L)
    const at::Tensor columns =
        u.unflatten(1, {pass.batch, length}).permute({0, 3, 2, 1}).reshape({-1, length, pass.batch});
    const at::Tensor y = at::bmm(toeplitz, columns);  // (R * width, rows, B)
    return y.view({pass.runs, config_.width, rows, pass.batch})
        .permute({0, 3, 2, 1})
        .reshape({pass.runs, pass.batch * rows, config_.width});
  }
};

}  // namespace

std::unique_ptr<Mixing> make_hyena(const ModelConfig& config, std::string prefix) {
  return std::make_unique<Hyena>(config, std::move(prefix));
}

}  // namespace lla::trained
