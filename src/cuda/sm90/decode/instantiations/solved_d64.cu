#include "cuda/sm90/decode/launch_solved.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_solved<64, true>(const Launch&);
template Status launch_solved<64, false>(const Launch&);
}  // namespace lla::cuda::sm90::decode
