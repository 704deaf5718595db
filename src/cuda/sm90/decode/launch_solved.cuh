#pragma once

#include "cuda/sm90/decode/launch.cuh"
#include "cuda/sm90/decode/solve.cuh"
#include "cuda/sm90/decode/stream.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim, bool kBf16, int kCluster>
Status launch_solve(const Params& p, cudaStream_t stream) {
  const auto kernel = solve_kernel<kDim, kBf16, kCluster>;
  constexpr size_t kBytes = sizeof(SolveShared<kDim>);
  constexpr const char* kName = "launching the decode solver";
  LLA_RETURN_IF_ERROR(allow_shared_memory(kernel, kBytes, kName));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kCluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.row_count * kCluster));
  config.blockDim = dim3(kSolveThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return to_status(cudaLaunchKernelEx(&config, kernel, p), kName);
}

template <int kDim, bool kBf16>
Status launch_solved(const Launch& call) {
  using C = Config<kDim, kBf16>;
  return for_each_share(call, {call.rows, kDim, false, call.blocks}, [&](const Params& p) -> Status {
    LLA_RETURN_IF_ERROR(launch_early(stream_kernel<C>, dim3(static_cast<unsigned>(call.blocks)), C::kThreads,
                                     sizeof(Shared<C>), call.stream, "launching the decode kernel", p));
    // Few rows have many parts each: a cluster puts them together.
    const bool few = p.row_count * 4 <= call.blocks;
    return few ? launch_solve<kDim, kBf16, kDim / 16>(p, call.stream) : launch_solve<kDim, kBf16, 1>(p, call.stream);
  });
}

}  // namespace lla::cuda::sm90::decode
