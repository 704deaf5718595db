// The solve A y = t of the backward pass: t, conjugate gradients and c in one persistent kernel, with the forward's
// passes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/tensor/backward/exponents.hpp"
#include "cuda/tensor/params.hpp"

namespace lla::cuda::sm90 {

// The forward's parameters with `saved` as input and no output but the info; x and o are not used.
struct SolveParams : ForwardParams {
  Rows g;
  float* y;          // [row][padded], in units of the row
  RowStart* starts;  // [row], for the solve's own use
  RowSizes* sizes;   // [row]
  HeadBounds* bounds;
};

template <int kDim, bool kCached>
Status launch_solve(const CUtensorMap& keys, const CUtensorMap& values, const SolveParams& params, int workers,
                    cudaStream_t stream);

}  // namespace lla::cuda::sm90
