#include "cuda/sm90/decode/launch_solved.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_solved<128, true>(const Launch&);
template Status launch_solved<128, false>(const Launch&);
}  // namespace lla::cuda::sm90::decode
