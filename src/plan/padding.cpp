#include "plan/padding.hpp"

#if LLA_HAVE_CUDA
#include "cuda/common/padding.hpp"
#endif

namespace lla::core {
namespace {

template <class Call>
Status zero(const Call& call) {
  if (!call.problem.packed) return {};
  const Padding padding(call);
#if LLA_HAVE_CUDA
  if (call.problem.device == Device::cuda) return cuda::zero_padding(padding, call.problem.device_index, call.stream);
#endif
  zero_on_host(padding);
  return {};
}

}  // namespace

Status zero_padding(const ForwardCall& call) { return zero(call); }
Status zero_padding(const BackwardCall& call) { return zero(call); }

}  // namespace lla::core
