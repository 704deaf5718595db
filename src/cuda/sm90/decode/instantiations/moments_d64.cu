#include "cuda/sm90/decode/launch_moments.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_moments<64>(const Launch&);
}  // namespace lla::cuda::sm90::decode
