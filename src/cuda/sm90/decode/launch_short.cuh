#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/decode/launch.hpp"
#include "cuda/sm90/decode/short.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim>
Status launch_short(const Params& p, int cluster, cudaStream_t stream) {
  const int key_heads = p.batch * (p.heads_q / p.group);
  return launch_early_in_clusters(short_kernel<kDim>, dim3(static_cast<unsigned>(key_heads * cluster)),
                                  static_cast<unsigned>(cluster), kSolveThreads, sizeof(ShortShared<kDim>), stream,
                                  "launching the decode kernel for short caches", p, cluster);
}

}  // namespace lla::cuda::sm90::decode
