// LDLᵀ of a matrix in shared memory by one block, in fp32, pivots guarded; and the solve that comes with it.
#pragma once

#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kSolveThreads = 256;
inline constexpr int kPanel = 16;

// Rows of the lower triangle, and behind them the right-hand side, which the elimination turns into D^-1 L^-1 b.
template <int kDim>
struct alignas(16) Matrix {
  static constexpr int kStride = kDim + 4;
  float at[kDim + 4][kStride];
  float panel[kPanel][kStride];   // columns being eliminated, transposed: as they are
  float scaled[kPanel][kStride];  // and over their pivots
  float lower[kPanel][kPanel];    // of the diagonal tile, transposed
  float inverse[kPanel];          // of the pivots; 0: dropped
  float start[kDim];              // the diagonal before anything was taken from it, uncentred
  int32_t drop[kDim];             // pivots at most 2^-drop of it are dropped
  float smallest;                 // pivot over start, of all that were not taken out on purpose
};

// A pivot at most this part of its start is all rounding: reported.
inline constexpr float kLeastPivot = 0x1p-16f;

template <int kDim>
__device__ void factor(Matrix<kDim>& m) {
  const int thread = threadIdx.x, lane = thread % 32;
  float smallest = 1;
  for (int first = 0; first < kDim; first += kPanel) {
    __syncthreads();
    if (thread < 32) {
      const int row = lane % kPanel;
      float v[kPanel];
#pragma unroll
      for (int j = 0; j < kPanel; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&m.at[first + row][first + j]);
        v[j] = four.x, v[j + 1] = four.y, v[j + 2] = four.z, v[j + 3] = four.w;
      }
      const float start = m.start[first + row];
      const float least = start * __int_as_float((127 - m.drop[first + row]) << 23);
      float mine = 0, own_pivot = 0;  // of this row; mine: its inverse
#pragma unroll
      for (int j = 0; j < kPanel; ++j) {
        const float pivot = __shfl_sync(0xffffffffu, v[j], j);
        const float limit = __shfl_sync(0xffffffffu, least, j);
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(pivot));
        inverse = pivot <= limit ? 0.0f : inverse;
        mine = row == j ? inverse : mine;
        own_pivot = row == j ? pivot : own_pivot;
        const float l = v[j] * inverse;
#pragma unroll
        for (int k = j + 1; k < kPanel; ++k) v[k] = fmaf(-l, __shfl_sync(0xffffffffu, v[j], k), v[k]);
        v[j] = l;
      }
      smallest = fminf(smallest, start > 0 ? own_pivot / start : 1.0f);
      if (lane < kPanel) {
        m.inverse[row] = mine;
#pragma unroll
        for (int j = 0; j < kPanel; ++j) {
          m.lower[j][row] = v[j];
          if (j < row) m.at[first + row][first + j] = v[j];
        }
      }
    }
    __syncthreads();
    const int below = first + kPanel;
    const int row = below + thread;
    if (row <= kDim) {  // the last one: the right-hand side
      float u[kPanel];
#pragma unroll
      for (int j = 0; j < kPanel; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&m.at[row][first + j]);
        u[j] = four.x, u[j + 1] = four.y, u[j + 2] = four.z, u[j + 3] = four.w;
      }
#pragma unroll
      for (int e = 0; e < kPanel - 1; ++e) {
#pragma unroll
        for (int j = (e + 1) / 4 * 4; j < kPanel; j += 4) {
          const float4 l = *reinterpret_cast<const float4*>(&m.lower[e][j]);
          if (j > e) u[j] = fmaf(-u[e], l.x, u[j]);
          if (j + 1 > e) u[j + 1] = fmaf(-u[e], l.y, u[j + 1]);
          if (j + 2 > e) u[j + 2] = fmaf(-u[e], l.z, u[j + 2]);
          if (j + 3 > e) u[j + 3] = fmaf(-u[e], l.w, u[j + 3]);
        }
      }
#pragma unroll
      for (int j = 0; j < kPanel; ++j) {
        m.panel[j][row] = u[j];
        u[j] *= m.inverse[j];
        m.scaled[j][row] = u[j];
      }
#pragma unroll
      for (int j = 0; j < kPanel; j += 4) {
        *reinterpret_cast<float4*>(&m.at[row][first + j]) = make_float4(u[j], u[j + 1], u[j + 2], u[j + 3]);
      }
    }
    __syncthreads();
    // What is left loses L D Lᵀ of these columns, in tiles of 4 x 4. Rows kDim .. kDim + 3: the right-hand side.
    const int tiles = (kDim - below) / 4;
    const int count = tiles * (tiles + 1) / 2 + tiles;
    for (int t = thread; t < count; t += kSolveThreads) {
      int tile_row = static_cast<int>((sqrtf(8.0f * static_cast<float>(t) + 1.0f) - 1.0f) * 0.5f);
      if (tile_row * (tile_row + 1) / 2 > t) --tile_row;
      if ((tile_row + 1) * (tile_row + 2) / 2 <= t) ++tile_row;
      const int i = below + 4 * tile_row, j = below + 4 * (t - tile_row * (tile_row + 1) / 2);
      float acc[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float4 four = *reinterpret_cast<const float4*>(&m.at[i + r][j]);
        acc[r][0] = four.x, acc[r][1] = four.y, acc[r][2] = four.z, acc[r][3] = four.w;
      }
#pragma unroll
      for (int e = 0; e < kPanel; ++e) {
        const float4 a = *reinterpret_cast<const float4*>(&m.scaled[e][i]);
        const float4 b = *reinterpret_cast<const float4*>(&m.panel[e][j]);
        const float l[4] = {a.x, a.y, a.z, a.w}, u[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[r][c] = fmaf(-l[r], u[c], acc[r][c]);
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        *reinterpret_cast<float4*>(&m.at[i + r][j]) = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      }
    }
  }
  if (thread < 32) {
#pragma unroll
    for (int by = 1; by < 32; by *= 2) smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, by));
    if (lane == 0) m.smallest = smallest;
  }
  __syncthreads();
}

// x = L^-T (the right-hand side's row), by the first warp; the caller puts a barrier after it.
template <int kDim>
__device__ void back_substitute(const Matrix<kDim>& m, float* x) {
  if (threadIdx.x >= 32) return;
  constexpr int kPerLane = kDim / 32;
  const int lane = threadIdx.x;
  float left[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) left[i] = m.at[kDim][lane + 32 * i];
#pragma unroll
  for (int i = kPerLane - 1; i >= 0; --i) {
#pragma unroll 8
    for (int j = 31; j >= 0; --j) {
      const float solved = __shfl_sync(0xffffffffu, left[i], j);
#pragma unroll
      for (int e = 0; e <= i; ++e) {
        const float l = m.at[32 * i + j][lane + 32 * e];
        if (e < i || lane < j) left[e] = fmaf(-l, solved, left[e]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[lane + 32 * i] = left[i];
}

}  // namespace lla::cuda::sm90::decode
