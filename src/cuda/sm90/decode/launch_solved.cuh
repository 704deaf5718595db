#pragma once

#include "cuda/sm90/decode/launch.cuh"
#include "cuda/sm90/decode/solve.cuh"
#include "cuda/sm90/decode/stream.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim, bool kBf16, int kCluster>
Status launch_solve(const Params& p, int32_t rows, cudaStream_t stream) {
  return launch_early_in_clusters(solve_kernel<kDim, kBf16, kCluster>, dim3(static_cast<unsigned>(rows * kCluster)),
                                  kCluster, kSolveThreads, sizeof(SolveShared<kDim>), stream,
                                  "launching the decode solver", p);
}

template <int kDim, bool kBf16, bool kSmallPages>
Status launch_solved_in(const Launch& call) {
  using C = Config<kDim, kBf16, kSmallPages>;
  const Layout layout = layout_of(call);
  return for_each_share(call, layout, [&](const Params& p) -> Status {
    LLA_RETURN_IF_ERROR(launch_early(stream_kernel<C>, dim3(static_cast<unsigned>(layout.blocks)), C::kThreads,
                                     sizeof(Shared<C>), call.stream, "launching the decode kernel", p));
    return launch_for_rows(
        p, kDim, p.row_count,
        [&](int32_t rows) { return launch_solve<kDim, kBf16, solving_cluster(kDim)>(p, rows, call.stream); },
        [&](int32_t rows) { return launch_solve<kDim, kBf16, 1>(p, rows, call.stream); });
  });
}

template <int kDim, bool kBf16>
Status launch_solved(const Launch& call) {
  return small_pages(call.p.cache) ? launch_solved_in<kDim, kBf16, true>(call)
                                   : launch_solved_in<kDim, kBf16, false>(call);
}

}  // namespace lla::cuda::sm90::decode
