// Launches the kernel of a problem's head dimension with a block for every tile of owned rows: `length` of each of
// `heads`. It keeps so many tiles of its own and of the other side in shared memory.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/portable/rows.cuh"

namespace lla::cuda::portable {

// kernel_of(bucket): the kernel compiled for that bound on head dimensions.
template <int kOwnTiles, int kOtherTiles, class T, class KernelOf>
Status launch_tiles(const Arguments<T>& a, int64_t length, int64_t heads, cudaStream_t stream, const char* what,
                    const KernelOf& kernel_of) {
  const core::Problem& p = a.problem;
  return with_bucket(dim_bucket(p.dim, p.value_dim), [&](auto bucket) {
    using C = Config<T, bucket.value>;
    constexpr size_t kShared = C::shared_bytes(kOwnTiles, kOtherTiles);
    static_assert(kShared <= kSharedMemoryLimit);
    return launch(kernel_of(bucket), tile_blocks(length, C::kOwn, heads, p.batch), C::kThreads, kShared, stream, what,
                  a);
  });
}

}  // namespace lla::cuda::portable
