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
  rest.publish(m, 0);
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel) {
    __syncthreads();
    eliminate_panel(m, panel, threadIdx.x, inverse_approx);
    if (panel + 1 == kPanels) break;
    __syncthreads();
    rest.update(m, panel);
    rest.publish(m, panel + 1);
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

// x = L^-T (what the elimination has made of the right-hand side), by the first warp; the caller puts a barrier after
// it. A loop, not all of it unrolled: instructions that run once cost what it takes to fetch them.
template <int kDim>
__device__ void back_substitute(const Matrix<kDim>& m, float* x) {
  if (threadIdx.x >= 32) return;
  constexpr int kOwn = kDim / 32;  // elements of a thread
  const int lane = threadIdx.x;
  float own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = m.rhs[kOwn * lane + i];
#pragma unroll 1
  for (int first = kDim - kPanel; first >= 0; first -= kPanel) {
    float solved[kPanel], l[kPanel][kPanel], before[kPanel][kOwn];
#pragma unroll
    for (int j = 1; j < kPanel; ++j) load_eight(l[j], &m.at(first + j, first));
#pragma unroll
    for (int j = 0; j < kPanel; ++j) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) before[j][i] = 0;
      if (kOwn * lane >= first) continue;
      if constexpr (kOwn == 4) {
        const float4 four = *reinterpret_cast<const float4*>(&m.at(first + j, kOwn * lane));
        before[j][0] = four.x, before[j][1] = four.y, before[j][2] = four.z, before[j][3] = four.w;
      } else {
        const float2 two = *reinterpret_cast<const float2*>(&m.at(first + j, kOwn * lane));
        before[j][0] = two.x, before[j][1] = two.y;
      }
    }
#pragma unroll
    for (int j = 0; j < kPanel; ++j) solved[j] = __shfl_sync(0xffffffffu, own[j % kOwn], (first + j) / kOwn);
#pragma unroll
    for (int j = kPanel - 1; j > 0; --j) {
#pragma unroll
      for (int k = 0; k < j; ++k) solved[k] = fmaf(-l[j][k], solved[j], solved[k]);
    }
#pragma unroll
    for (int j = kPanel - 1; j >= 0; --j) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own[i] = fmaf(-before[j][i], solved[j], own[i]);
    }
    if (lane == 0) store_eight(x + first, solved);
  }
}

}  // namespace lla::cuda::sm90::decode
