#pragma once

#include "cuda/sm90/decode/launch.cuh"
#include "cuda/sm90/decode/moments.cuh"
#include "cuda/sm90/decode/moments_solve.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim, int kCluster>
Status launch_moments_solve(const Params& p, int32_t rows, cudaStream_t stream) {
  return launch_early_in_clusters(
      moments_solve_kernel<kDim, true, kCluster>, dim3(static_cast<unsigned>(rows * kCluster)), kCluster, kSolveThreads,
      sizeof(SolveShared<kDim>), stream, "launching the solver between the passes of decode", p);
}

template <int kDim, bool kSmallPages>
Status launch_moments_in(const Launch& call) {
  using C = MomentsConfig<kDim, kSmallPages>;
  const Layout layout = layout_of(call);
  return for_each_share(call, layout, [&](const Params& p) -> Status {
    LLA_RETURN_IF_ERROR(launch_early(moments_kernel<C>, dim3(static_cast<unsigned>(layout.blocks)), C::kThreads,
                                     sizeof(MomentsShared<C>), call.stream, "launching the first pass of decode", p));
    return launch_for_rows(
        p, kDim, p.row_count * p.bundle,
        [&](int32_t rows) { return launch_moments_solve<kDim, solving_cluster(kDim)>(p, rows, call.stream); },
        [&](int32_t rows) { return launch_moments_solve<kDim, 1>(p, rows, call.stream); });
  });
}

template <int kDim>
Status launch_moments(const Launch& call) {
  return small_pages(call.p.cache) ? launch_moments_in<kDim, true>(call) : launch_moments_in<kDim, false>(call);
}

}  // namespace lla::cuda::sm90::decode
