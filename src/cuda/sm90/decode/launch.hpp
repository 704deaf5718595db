// Launching the decode kernels.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/decode/params.hpp"

namespace lla::cuda::sm90::decode {

// A call: at most so many rows (or bundles of them), in the given workspace. Of p, the workspace's pointers and the share of the rows are
// set here.
struct Launch {
  Form form;
  Params p;
  int64_t rows;
  int dim;  // 64 or 128: of the kernel
  bool bf16;
  int multiprocessors;
  int64_t sharing;  // rows of a sequence that have the same keys, at most
  int64_t pieces;   // of a row, at most, where rows are cut by their own lengths; else 0
  bool alone;       // no row shares keys, and no prompts can be beside them
  void* workspace;
  cudaStream_t stream;
};

// How the kernels are to read the cache: box, vectors and maps of p, from its other fields. `pages` counts sequences
// where there is no table. `most_keys`: of a box.
Status describe_cache(Params& p, int most_keys);
// Keys of a box of which a stage of the streaming kernel is one, or a tile of the first of two passes (or of the kernels
// with x given).
constexpr int box_keys(Form form, int dim) {
  return form == Form::solved ? 4096 / dim : form == Form::moments ? kMomentsKeys : kAlign;
}

Status launch(const Launch& call);
// The kernel for short caches, in clusters of so many blocks: does nothing where one is longer.
Status launch_short(const Params& p, int dim, int cluster, cudaStream_t stream);

template <int kDim, bool kBf16>
Status launch_solved(const Launch& call);
template <int kDim, bool kBf16>
Status launch_given_x(const Launch& call);
template <int kDim>
Status launch_moments(const Launch& call);  // of bf16
template <int kDim>
Status launch_short(const Params& p, int cluster, cudaStream_t stream);  // of bf16

}  // namespace lla::cuda::sm90::decode
