#include "cuda/sm90/decode/launch_given_x.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_given_x<64, true>(const Launch&);
template Status launch_given_x<64, false>(const Launch&);
}  // namespace lla::cuda::sm90::decode
