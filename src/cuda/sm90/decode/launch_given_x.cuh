#pragma once

#include "cuda/sm90/decode/bundle.cuh"
#include "cuda/sm90/decode/given_x.cuh"
#include "cuda/sm90/decode/launch.cuh"

namespace lla::cuda::sm90::decode {

// The kernel for rows on their own, or in bundles, and the one that puts their parts together.
template <class C, class Shared, int kBundle, class Kernel>
Status launch_given_x_in(const Launch& call, Kernel kernel) {
  const Layout layout = layout_of(call);
  return for_each_share(call, layout, [&](const Params& p) -> Status {
    LLA_RETURN_IF_ERROR(launch_early(kernel, dim3(static_cast<unsigned>(layout.blocks)), C::kThreads, sizeof(Shared),
                                     call.stream, "launching the decode kernel for given x", p));
    const int rows = static_cast<int>(std::min<int64_t>(call.sharing, kBundle));  // of a bundle, at most
    return launch_early(given_x_merge_kernel<Shared::kDim, kBundle>, dim3(static_cast<unsigned>(p.row_count * rows)),
                        Shared::kDim, 0, call.stream, "launching the decode merge", p, rows);
  });
}

template <int kDim, bool kBf16, bool kSmallPages>
Status launch_given_x_from(const Launch& call) {
  using Row = GivenXConfig<kDim, kBf16, kSmallPages, kGivenXWarps>;
  using Bundle = GivenXConfig<kDim, kBf16, kSmallPages, kBundleWarps>;
  return call.form == Form::bundles
             ? launch_given_x_in<Bundle, BundleShared<Bundle>, kBundleRows>(call, bundle_kernel<Bundle>)
             : launch_given_x_in<Row, GivenXShared<Row>, 1>(call, given_x_kernel<Row>);
}

template <int kDim, bool kBf16>
Status launch_given_x(const Launch& call) {
  return small_pages(call.p.cache) ? launch_given_x_from<kDim, kBf16, true>(call)
                                   : launch_given_x_from<kDim, kBf16, false>(call);
}

}  // namespace lla::cuda::sm90::decode
