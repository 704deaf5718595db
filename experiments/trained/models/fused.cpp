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
