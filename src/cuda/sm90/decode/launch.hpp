// Launching the decode kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/decode/params.hpp"

namespace lla::cuda::sm90::decode {

// Where things lie in the workspace. Independent of the cache's capacity: a slot for every row of a launch and every
// block. Where there are more rows, they go in several launches.
struct Layout {
  int32_t rows_at_once = 0, launches = 0;
  int64_t slots = 0, records = 0, live_rows = 0, size = 0;

  Layout(int64_t rows, int dim, int blocks) {
    const int64_t slot = int64_t{slot_floats(dim)} * 4;
    const int64_t most = kMostBytes / slot - blocks;
    rows_at_once = static_cast<int32_t>(rows < most ? rows : most);
    launches = rows == 0 ? 0 : static_cast<int32_t>((rows + rows_at_once - 1) / rows_at_once);
    slots = 0;
    records = slot * (int64_t{rows_at_once} + blocks);
    live_rows = records + int64_t{rows_at_once} * int64_t{sizeof(RowRecord)};
    size = live_rows + 16;
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{64} << 20;
};

// `rows`: at most so many are decoded. p's workspace pointers and share of rows are set here.
Status launch_decode(Params p, const Layout& at, void* workspace, int64_t rows, int dim, bool bf16, int multiprocessors,
                     cudaStream_t stream);

}  // namespace lla::cuda::sm90::decode
