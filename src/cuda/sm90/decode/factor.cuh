// The elimination (eliminate.hpp) by one block, and the solve that comes with it.
#pragma once

#include "cuda/sm90/decode/eliminate.hpp"
#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90::decode {

__device__ __forceinline__ float inverse_approx(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

template <int kDim>
__device__ void factor(Matrix<kDim>& m) {
  constexpr int kPanels = kDim / kPanel;
  __syncthreads();
  Remaining<kDim> rest(m, threadIdx.x);
  rest.publish(m);
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel) {
    __syncthreads();
    eliminate_panel(m, panel, threadIdx.x, inverse_approx);
    if (panel + 1 == kPanels) break;
    __syncthreads();
    rest.update(m, panel);
  }
  __syncthreads();
}

// The smallest pivot over its start, by a whole warp.
template <int kDim>
__device__ __forceinline__ float smallest_pivot(const Matrix<kDim>& m) {
  float smallest = 1;
  for (int d = threadIdx.x % 32; d < kDim; d += 32) {
    if (m.start[d] > 0) smallest = fminf(smallest, m.pivot[d] / m.start[d]);
  }
#pragma unroll
  for (int by = 1; by < 32; by *= 2) smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, by));
  return smallest;
}

// x = L^-T (what the elimination has made of the right-hand side), scaled back, by a thread for each element; the caller
// puts a barrier after it. Whoever needs eight solved elements solves for them; what the next step multiplies is on its
// way meanwhile. A loop, not all of it unrolled: instructions that run once cost what it takes to fetch them.
template <int kDim>
__device__ void back_substitute(Matrix<kDim>& m, float* x) {
  const int column = threadIdx.x;
  if (column >= kDim) return;
  float own = m.rhs[column], l[kPanel][kPanel], before[kPanel];
  float* const left = m.columns[0];  // what is left of the right-hand side, from its end on
  const auto load_block = [&](int first) {
#pragma unroll
    for (int j = 1; j < kPanel; ++j) load_eight(l[j], &m.at(first + j, first));
  };
  const auto load_before = [&](int first) {
#pragma unroll
    for (int j = 0; j < kPanel; ++j) before[j] = column < first ? m.at(first + j, column) : 0;
  };
  load_block(kDim - kPanel);
  load_before(kDim - kPanel);
#pragma unroll 1
  for (int first = kDim - kPanel; first >= 0; first -= kPanel) {
    const int next = first > 0 ? first - kPanel : 0;
    if (column / kPanel == first / kPanel) left[column] = own;
    named_sync(1, kDim);
    float solved[kPanel];
    load_eight(solved, &left[first]);
#pragma unroll
    for (int j = kPanel - 1; j > 0; --j) {
#pragma unroll
      for (int k = 0; k < j; ++k) solved[k] = fmaf(-l[j][k], solved[j], solved[k]);
    }
    load_block(next);
    float other = 0;
#pragma unroll
    for (int j = kPanel - 1; j >= 0; j -= 2) {
      own = fmaf(-before[j], solved[j], own);
      other = fmaf(-before[j - 1], solved[j - 1], other);
    }
    own += other;
    load_before(next);
    if (column == first) {
      float scale[kPanel];
      load_eight(scale, &m.scale[first]);
#pragma unroll
      for (int j = 0; j < kPanel; ++j) solved[j] *= scale[j];
      store_eight(x + first, solved);
    }
  }
}

}  // namespace lla::cuda::sm90::decode
