#include "models/fused.hpp"

#include "kernels/fused.hpp"

// torch's own function, by its C interface: this file needs no CUDA headers, and a torch without CUDA has none.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace lla::trained {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

#ifdef LLA_TRAINED_KERNELS

kernels::Stream stream_of(const at::Tensor& x) {
  void* stream = nullptr;
  TORCH_CHECK(
      aoti_torch_get_current_cuda_stream != nullptr && aoti_torch_get_current_cuda_stream(x.get_device(), &stream) == 0,
      "torch gave no CUDA stream");
  return stream;
}

bool is_aligned(const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0; }
bool has_norm(const at::Tensor& x) {
  const int64_t width = x.size(-1);
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && width % kernels::norm_width_unit == 0 &&
         width <= kernels::norm_width_limit;
}
at::Tensor dense(const at::Tensor& x) {
  const at::Tensor y = x.contiguous();
  return is_aligned(y) ? y : y.clone();
}

// y, or {sum, y} where something is added.
class Norm : public ::torch::autograd::Function<Norm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& given, const std::optional<at::Tensor>& more,
                               double scale, double epsilon) {
    const at::Tensor x = dense(given), added = more ? dense(*more) : at::Tensor();
    const int64_t width = x.size(-1), rows = x.numel() / width;
    const at::Tensor y = at::empty_like(x), sum = more ? at::empty_like(x) : at::Tensor();
    const at::Tensor inverse = at::empty({rows}, x.options().dtype(at::kFloat));
    kernels::norm_forward(x.const_data_ptr(), more ? added.const_data_ptr() : nullptr,
                          more ? sum.mutable_data_ptr() : nullptr, y.mutable_data_ptr(),
                          inverse.mutable_data_ptr<float>(), rows, width, static_cast<float>(scale),
                          static_cast<float>(epsilon), stream_of(x));
    context->save_for_backward({y, inverse});
    context->saved_data["scale"] = scale;
    context->saved_data["added"] = more.has_value();
    context->set_materialize_grads(false);
    if (more) return {sum, y};
    return {y};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& y = saved[0];
    const bool added = context->saved_data["added"].toBool();
    const at::Tensor dsum = added && grads[0].defined() ? dense(grads[0]) : at::Tensor();
    const at::Tensor& dy = grads[added ? 1 : 0];
    at::Tensor dx = dsum;
    if (dy.defined()) {
      const at::Tensor slopes = dense(dy);
      dx = at::empty_like(y);
      kernels::norm_backward(slopes.const_data_ptr(), dsum.defined() ? dsum.const_data_ptr() : nullptr,
                             y.const_data_ptr(), saved[1].const_data_ptr<float>(), dx.mutable_data_ptr(),
                             y.numel() / y.size(-1), y.size(-1),
                             static_cast<float>(context->saved_data["scale"].toDouble()), stream_of(y));
    }
    return {dx, added ? dx : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class SharedRidge : public ::torch::autograd::Function<SharedRidge> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, int64_t heads, double floor) {
    const int64_t sequences = logits.size(0), rows = logits.size(1), width = logits.size(2);
    const at::Tensor ridge = at::empty({sequences, rows, width}, logits.options().dtype(at::kFloat));
    kernels::ridge_forward(logits.const_data_ptr(), logits.stride(1), ridge.mutable_data_ptr<float>(), sequences * rows,
                           width, static_cast<float>(floor), stream_of(logits));
    context->save_for_backward({ridge});
    context->saved_data["floor"] = floor;
    return ridge.unsqueeze(2).expand({-1, -1, heads, -1});
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const at::Tensor ridge = context->get_saved_variables()[0], slopes = dense(grads[0]);
    const at::Tensor dlogits = at::empty(ridge.sizes(), ridge.options().dtype(at::kBFloat16));
    kernels::ridge_backward(slopes.const_data_ptr<float>(), ridge.const_data_ptr<float>(), dlogits.mutable_data_ptr(),
                            ridge.size(0) * ridge.size(1), slopes.size(2), ridge.size(2),
                            static_cast<float>(context->saved_data["floor"].toDouble()), stream_of(ridge));
    return {dlogits, at::Tensor(), at::Tensor()};
  }
};

// Rows at equal distances, also from one sequence to the next, each at 16 bytes.
bool has_ridge(const at::Tensor& logits) {
  return logits.is_cuda() && logits.scalar_type() == at::kBFloat16 && logits.size(2) % 8 == 0 &&
         logits.stride(2) == 1 && logits.stride(1) % 8 == 0 && logits.stride(0) == logits.stride(1) * logits.size(1) &&
         is_aligned(logits);
}

#endif

at::Tensor plain_norm(const at::Tensor& x, double scale, double epsilon) {
  std::optional<at::Tensor> weight;
  if (scale != 1) weight = at::full({x.size(-1)}, scale, x.options());
  return at::rms_norm(x, {x.size(-1)}, weight, epsilon);
}

}  // namespace

at::Tensor fused_rms_norm(const at::Tensor& x, double scale, double epsilon) {
#ifdef LLA_TRAINED_KERNELS
  if (has_norm(x)) return Norm::apply(x, std::nullopt, scale, epsilon)[0];
#endif
  return plain_norm(x, scale, epsilon);
}

SumAndNorm fused_sum_and_norm(const at::Tensor& x, const at::Tensor& added, double epsilon) {
#ifdef LLA_TRAINED_KERNELS
  if (has_norm(x)) {
    const variable_list both = Norm::apply(x, std::optional<at::Tensor>(added), 1.0, epsilon);
    return {both[0], both[1]};
  }
#endif
  const at::Tensor sum = x + added;
  return {sum, plain_norm(sum, 1, epsilon)};
}

at::Tensor shared_ridge(const at::Tensor& logits, int64_t heads, double floor) {
#ifdef LLA_TRAINED_KERNELS
  if (has_ridge(logits)) return SharedRidge::apply(logits, heads, floor);
#endif
  at::Tensor ridge = logits.to(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat).sigmoid();
  if (floor > 0) ridge = ridge * (1 - floor) + floor;
  return ridge.unsqueeze(2).expand({-1, -1, heads, -1});
}

bool has_label_slopes(const at::Tensor& features, int64_t vocabulary) {
#ifdef LLA_TRAINED_KERNELS
  return features.is_cuda() && features.scalar_type() == at::kBFloat16 && vocabulary % kernels::vocabulary_unit == 0 &&
         vocabulary <= kernels::vocabulary_limit;
#else
  return (void)features, (void)vocabulary, false;
#endif
}

at::Tensor label_slopes(const at::Tensor& logits, const at::Tensor& labels, at::Tensor& loss) {
#ifdef LLA_TRAINED_KERNELS
  const at::Tensor places = labels.contiguous();
  kernels::label_slopes(logits.mutable_data_ptr(), places.const_data_ptr<int64_t>(), loss.mutable_data_ptr<float>(),
                        labels.numel(), logits.size(-1), stream_of(logits));
  return logits.view(at::kBFloat16);
#else
  return (void)labels, (void)loss, logits;
#endif
}

}  // namespace lla::trained
