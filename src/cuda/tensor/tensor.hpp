// What tensor-core kernels of every architecture share: the schedule, rows, fragments, weights, the step of conjugate
// gradients, the pre-pass, the backward's exponents and operands. Nothing here knows wgmma or TMA: mma.sync has the
// same accumulator layout per warp.
//
// Each architecture uses these by their plain names and is listed here once.
#pragma once

namespace lla::cuda::tensor {}
namespace lla::cuda::sm90 {
using namespace tensor;
}
