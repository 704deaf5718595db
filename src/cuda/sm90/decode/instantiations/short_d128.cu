#include "cuda/sm90/decode/launch_short.cuh"

namespace lla::cuda::sm90::decode {
template Status launch_short<128>(const Params&, int, cudaStream_t);
}  // namespace lla::cuda::sm90::decode
