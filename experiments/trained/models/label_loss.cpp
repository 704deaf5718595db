// With 8,192 words the logits are the largest tensor of a step by far, so a step should go over them as seldom as it
// can. Log-probabilities are kept in fp32 and nothing else of their size: the gradient of the logits is their
// exponential, less one at the label, and goes into two products. On a GPU the logits are fp16 (normed features against
// an embedding stay far below its range, and it has three bits more than bf16), which torch's log-softmax reads and
// widens in one pass.
#include "models/label_loss.hpp"

namespace lla::trained {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

class LabelLosses : public ::torch::autograd::Function<LabelLosses> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& features, const at::Tensor& matrix,
                            const at::Tensor& labels) {
    const bool narrow = features.scalar_type() == at::kBFloat16;
    at::Tensor chances;
    if (narrow && features.is_cuda()) {
      chances = at::_log_softmax(at::bmm(features.to(at::kHalf), matrix.to(at::kHalf)), -1, /*half_to_float=*/true);
    } else {
      const at::Tensor logits = at::bmm(features, matrix);
      chances = at::_log_softmax(narrow ? logits.to(at::kFloat) : logits, -1, /*half_to_float=*/false);
    }
    context->save_for_backward({features, matrix, labels, chances});
    return chances.gather(-1, labels.unsqueeze(-1)).flatten(1).mean(1).neg_();
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &features = saved[0], &matrix = saved[1], &chances = saved[3];
    const at::Tensor place = saved[2].unsqueeze(-1);
    at::Tensor slope = at::empty(chances.sizes(), features.options());
    at::exp_out(slope, chances);
    // Of the label's own in full precision: near certainty it is a small difference of near equals.
    slope.scatter_(-1, place, at::expm1(chances.gather(-1, place)).to(slope.scalar_type()));
    const at::Tensor scale =
        (grads[0] / static_cast<double>(saved[2].size(1))).view({-1, 1, 1}).to(features.scalar_type());
    return {at::bmm(slope, matrix.transpose(1, 2)) * scale, at::bmm((features * scale).transpose(1, 2), slope),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor label_losses(const at::Tensor& features, const at::Tensor& matrix, const at::Tensor& labels) {
  return LabelLosses::apply(features, matrix, labels);
}

}  // namespace lla::trained
