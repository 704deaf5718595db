// Launching the decode kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/sm90/decode/params.hpp"

namespace lla::cuda::sm90::decode {

// Where things lie in the workspace. Independent of the cache's capacity: a slot for every row of a launch and every
// block. Where there are more rows, they go in several launches.
struct Layout {
  int32_t rows_at_once = 0;
  int64_t records = 0, live_rows = 0, size = 0;  // slots come first

  Layout(int64_t rows, int64_t slot_floats, int blocks) {
    const int64_t slot = slot_floats * 4;
    rows_at_once = static_cast<int32_t>(std::max<int64_t>(1, std::min(rows, kMostBytes / slot - blocks)));
    records = (slot * (int64_t{rows_at_once} + blocks) + 255) / 256 * 256;
    live_rows = records + int64_t{rows_at_once} * int64_t{sizeof(RowRecord)};
    size = live_rows + 16;
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{64} << 20;
};

// A call: at most so many rows, in the given workspace. Of p, the workspace's pointers and the share of the rows are
// set here.
struct Launch {
  Params p;
  int64_t rows;
  int dim;  // 64 or 128: of the kernel
  bool bf16;
  int blocks;  // multiprocessors
  void* workspace;
  cudaStream_t stream;
};

// How the kernels are to read the cache: box, vectors and maps of p, from its other fields. `pages` counts sequences
// where there is no table.
Status describe_cache(Params& p);

Layout layout_of(int64_t rows, int dim, bool given_x, int blocks);
Status launch(const Launch& call, bool given_x);

template <int kDim, bool kBf16>
Status launch_solved(const Launch& call);
template <int kDim, bool kBf16>
Status launch_given(const Launch& call);

}  // namespace lla::cuda::sm90::decode
