#pragma once

#include "cuda/sm90/decode/given_x.cuh"
#include "cuda/sm90/decode/launch.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim, bool kBf16, bool kSmallPages>
Status launch_given_x_in(const Launch& call) {
  using C = GivenXConfig<kDim, kBf16, kSmallPages>;
  const Layout layout = layout_of(call);
  return for_each_share(call, layout, [&](const Params& p) -> Status {
    LLA_RETURN_IF_ERROR(launch_early(given_x_kernel<C>, dim3(static_cast<unsigned>(layout.blocks)), kGivenXThreads,
                                     sizeof(GivenXShared<C>), call.stream, "launching the decode kernel for given x",
                                     p));
    const int rows = static_cast<int>(std::min<int64_t>(call.sharing, p.bundle));  // of a bundle, at most
    return launch_early(given_x_merge_kernel<kDim>, dim3(static_cast<unsigned>(p.row_count * rows)), kDim, 0,
                        call.stream, "launching the decode merge", p, rows);
  });
}

template <int kDim, bool kBf16>
Status launch_given_x(const Launch& call) {
  return small_pages(call.p.cache) ? launch_given_x_in<kDim, kBf16, true>(call)
                                   : launch_given_x_in<kDim, kBf16, false>(call);
}

}  // namespace lla::cuda::sm90::decode
