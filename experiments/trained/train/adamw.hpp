// AdamW over the parameters of R runs in one (R, P) buffer. Learning rate, step and bias correction are tensors on the
// device with a row for every run, so that a step can be captured once and replayed; each run's numbers depend on its
// own row only.
#pragma once

#include <vector>

#include "torch.hpp"

namespace lla::trained {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double clip = 0;  // of each run's gradient norm; 0: none
};

class AdamW {
 public:
  // master (R, P) fp32 is taken over. schedule: what a run's learning rate is multiplied by at each of its steps; its
  // length is the number of steps a run may take.
  AdamW(at::Tensor master, const at::Tensor& decay_mask, const std::vector<double>& learning_rates,
        const std::vector<double>& schedule, const AdamWOptions& options);

  // One step of every run with gradient (R, P), which is overwritten where it is clipped.
  void step(at::Tensor& gradient);
  // Only these runs stay, in this order.
  void keep(const std::vector<int64_t>& runs);

  // State of the runs; changed in place by step().
  at::Tensor master, first, second;  // (R, P) fp32: parameters and moments
  at::Tensor steps;                  // (R) int64: done

 private:
  AdamWOptions options_;
  at::Tensor decay_;                 // (P): weight decay where it applies, else 0
  at::Tensor rates_;                 // (R) learning rates
  at::Tensor schedule_, one_, two_;  // (steps): multiplier, bias corrections of the moments
};

// Linear warm-up, then a cosine from 1 to `final` at the last step, or constant.
std::vector<double> schedule(const std::string& kind, int64_t steps, int64_t warmup, double final);

}  // namespace lla::trained
