// With 8,192 words the logits are the largest tensor of a step by far, so a step should go over them as seldom as it
// can. On a GPU they are fp16 (normed features against an embedding stay far below its range, and it has three bits
// more than bf16) and one kernel turns them, in place, into the gradient of the loss by the logits, which goes into two
// products. Elsewhere log-probabilities are kept, and the gradient is their exponential, less one at the label.
#include "models/label_loss.hpp"

#include "models/fused.hpp"

namespace lla::trained {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

class LabelLosses : public ::torch::autograd::Function<LabelLosses> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& features, const at::Tensor& matrix,
                            const at::Tensor& labels) {
    at::Tensor loss, slope;
    if (has_label_slopes(features, matrix.size(2))) {
      loss = at::empty(labels.sizes(), features.options().dtype(at::kFloat));
      slope = label_slopes(at::bmm(features.to(at::kHalf), matrix.to(at::kHalf)), labels, loss);
    } else {
      const at::Tensor logits = at::bmm(features, matrix);
      const at::Tensor chances =
          at::log_softmax(logits.scalar_type() == at::kBFloat16 ? logits.to(at::kFloat) : logits, -1);
      const at::Tensor place = labels.unsqueeze(-1), chance = chances.gather(-1, place);
      loss = -chance.squeeze(-1);
      // Of the label's own in full precision: near certainty it is a small difference of near equals.
      slope = chances.exp().scatter_(-1, place, at::expm1(chance)).to(features.scalar_type());
    }
    context->save_for_backward({features, matrix, slope});
    return loss.mean(1);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &features = saved[0], &matrix = saved[1], &slope = saved[2];
    const auto count = static_cast<double>(features.size(1));
    const at::Tensor scale = (grads[0] / count).view({-1, 1, 1}).to(features.scalar_type());
    return {at::bmm(slope, matrix.transpose(1, 2)) * scale, at::bmm((features * scale).transpose(1, 2), slope),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor label_losses(const at::Tensor& features, const at::Tensor& matrix, const at::Tensor& labels) {
  return LabelLosses::apply(features, matrix, labels);
}

}  // namespace lla::trained
