#include "cuda/sm90/backward/key_pass.cuh"

namespace lla::cuda::sm90 {
template Status launch_key_pass<128, false>(const KeyPassParams&, cudaStream_t);
}
