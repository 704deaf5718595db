#include "cuda/sm90/sm90.hpp"

namespace lla::cuda::sm90 {

const core::Implementation implementation = {
    "sm90",
    "Hopper tensor cores: bf16, f16 and f32 as TF32, head dimensions up to 128",
    core::Device::cuda,
    refuse,
    plan,
    notes,
    forward,
    backward};

}  // namespace lla::cuda::sm90
