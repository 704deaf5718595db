#include "cuda/sm90/decode/launch_given_x.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_given_x<128, true>(const Launch&);
template Status launch_given_x<128, false>(const Launch&);
}  // namespace lla::cuda::sm90::decode
