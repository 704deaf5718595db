#include "cuda/sm90/forward/launch.cuh"

namespace lla::cuda::sm90 {
template Status launch_forward<ForwardConfig<64, false>>(const CUtensorMap&, const CUtensorMap&, const ForwardParams&,
                                                         int, cudaStream_t);
}  // namespace lla::cuda::sm90
