#include "cuda/sm90/parallax/launch.cuh"

namespace lla::cuda::sm90 {
template Status launch_parallax<ParallaxConfig<64, true, true>>(const CUtensorMap&, const CUtensorMap&,
                                                                const ForwardParams&, int, cudaStream_t);
}  // namespace lla::cuda::sm90
