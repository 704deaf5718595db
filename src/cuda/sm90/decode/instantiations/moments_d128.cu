#include "cuda/sm90/decode/launch_moments.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_moments<128>(const Launch&);
}  // namespace lla::cuda::sm90::decode
