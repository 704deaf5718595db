#include "models/parameters.hpp"

#include <cmath>
#include <stdexcept>

#include "common/random.hpp"

namespace lla::trained {
namespace {

constexpr int64_t alignment = 64;  // elements: 128 bytes in bf16, so that every matrix suits the tensor cores
constexpr uint64_t init_purpose = 0x696e6974;

int64_t product(const std::vector<int64_t>& shape) {
  int64_t size = 1;
  for (int64_t side : shape) size *= side;
  return size;
}
int64_t padded(int64_t size) { return (size + alignment - 1) / alignment * alignment; }

// By name, not by place: a model with one more option still starts the rest from the same values.
uint64_t stream_of(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

void fill(const Parameter& parameter, uint64_t seed, float* out) {
  const experiments::Stream stream(seed, stream_of(parameter.name), init_purpose);
  const auto [kind, a, b] = parameter.init;
  if (kind == Init::normal) {
    stream.normal(out, static_cast<size_t>(parameter.size));
    for (int64_t i = 0; i < parameter.size; ++i) out[i] *= static_cast<float>(a);
    return;
  }
  for (int64_t i = 0; i < parameter.size; ++i) {
    const double u = stream.uniform(static_cast<uint64_t>(i));
    double value = 0;
    switch (kind) {
      case Init::zeros:
      case Init::normal: break;
      case Init::ones: value = 1; break;
      case Init::uniform: value = a + (b - a) * u; break;
      case Init::log_uniform: value = std::log(a + (b - a) * u); break;
      case Init::inverse_softplus: value = std::log(std::expm1(a * std::pow(b / a, u))); break;
    }
    out[i] = static_cast<float>(value);
  }
}

}  // namespace

void ParameterTable::add(std::string name, std::vector<int64_t> shape, InitRule init, bool decay, bool full) {
  const int64_t size = product(shape);
  if (!places_.emplace(name, all_.size()).second) throw std::logic_error("two parameters are called " + name);
  all_.push_back({std::move(name), std::move(shape), init, decay, full, 0, size});
}

void ParameterTable::finish() {
  for (const bool full : {false, true}) {
    for (Parameter& parameter : all_) {
      if (parameter.full != full) continue;
      parameter.offset = total_;
      total_ += padded(parameter.size);
    }
    if (!full) cast_ = total_;
  }
}

size_t ParameterTable::index(std::string_view name) const {
  const auto place = places_.find(std::string(name));
  if (place == places_.end()) throw std::out_of_range("no parameter is called " + std::string(name));
  return place->second;
}

int64_t ParameterTable::count() const {
  int64_t sum = 0;
  for (const Parameter& parameter : all_) sum += parameter.size;
  return sum;
}

at::Tensor ParameterTable::init(uint64_t seed) const {
  at::Tensor values = at::zeros({total_}, at::kFloat);
  for (const Parameter& parameter : all_) fill(parameter, seed, values.data_ptr<float>() + parameter.offset);
  return values;
}

at::Tensor ParameterTable::decay_mask() const {
  at::Tensor mask = at::zeros({total_}, at::kFloat);
  for (const Parameter& parameter : all_) {
    if (parameter.decay) mask.narrow(0, parameter.offset, parameter.size).fill_(1);
  }
  return mask;
}

StackedParameters::StackedParameters(const ParameterTable& table, const at::Tensor& master, at::ScalarType compute,
                                     bool learn)
    : table_(&table), runs_(master.size(0)), compute_(compute) {
  TORCH_CHECK(master.dim() == 2 && master.size(1) == table.total(), "the weights are ", master.sizes(),
              ", the model has ", table.total(), " a run");
  const at::Tensor source = master.detach();
  const at::Tensor cast = source.narrow(1, 0, table.cast()).to(compute);
  views_.reserve(table.all().size());
  for (const Parameter& parameter : table.all()) {
    std::vector<int64_t> size{runs_};
    size.insert(size.end(), parameter.shape.begin(), parameter.shape.end());
    // A place in the cast part is the same there: it begins at 0.
    at::Tensor view = (parameter.full ? source : cast).narrow(1, parameter.offset, parameter.size).view(size);
    views_.push_back(view.detach().requires_grad_(learn));
  }
}

void StackedParameters::gradients(const at::Tensor& loss, at::Tensor& out) const {
  const auto grads = ::torch::autograd::grad({loss}, {views_.begin(), views_.end()}, /*grad_outputs=*/{},
                                             /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                                             /*allow_unused=*/true);
  // One concatenation for each of the two parts instead of a copy for every parameter.
  for (const bool full : {false, true}) {
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < grads.size(); ++i) {
      const Parameter& parameter = table_->all()[i];
      if (parameter.full != full) continue;
      const auto options = views_[i].options();
      parts.push_back(grads[i].defined() ? grads[i].reshape({runs_, parameter.size})
                                         : at::zeros({runs_, parameter.size}, options));
      const int64_t gap = padded(parameter.size) - parameter.size;
      if (gap > 0) parts.push_back(at::zeros({runs_, gap}, options));
    }
    if (parts.empty()) continue;
    const int64_t begin = full ? table_->cast() : 0;
    const int64_t size = full ? table_->total() - table_->cast() : table_->cast();
    out.narrow(1, begin, size).copy_(at::cat(parts, 1));
  }
}

}  // namespace lla::trained
