#include "cuda/sm90/given_x/launch.cuh"

namespace lla::cuda::sm90 {
template Status launch_given_x<GivenXConfig<128, true>>(const CUtensorMap&, const CUtensorMap&, const ForwardParams&,
                                                        int, cudaStream_t);
}  // namespace lla::cuda::sm90
