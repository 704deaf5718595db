#include "cuda/sm90/decode/launch_given.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_given<64, true>(const Launch&);
template Status launch_given<64, false>(const Launch&);
}  // namespace lla::cuda::sm90::decode
