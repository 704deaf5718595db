// LDLᵀ of a matrix in shared memory by one block, in fp32, pivots guarded; and the solve that comes with it.
#pragma once

#include "cuda/sm90/ptx.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kSolveThreads = 256;
inline constexpr int kPanel = 8;

// Rows of the lower triangle, and behind them the right-hand side, which the elimination turns into D^-1 L^-1 b.
template <int kDim>
struct alignas(16) Matrix {
  static constexpr int kStride = kDim + 4;
  float at[kDim + 4][kStride];
  float panel[kPanel][kStride];   // columns being eliminated, transposed: as they are
  float scaled[kPanel][kStride];  // and over their pivots
  float start[kDim];              // the diagonal before anything was taken from it, uncentred
  float limit[kDim];              // pivots up to this are dropped
  float pivot[kDim];
};

// A pivot at most this part of its start is all rounding: reported.
inline constexpr float kLeastPivot = 0x1p-16f;

__device__ __forceinline__ void load_eight(float (&to)[kPanel], const float* from) {
  const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}
__device__ __forceinline__ void store_eight(float* to, const float (&from)[kPanel]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
  *reinterpret_cast<float4*>(to + 4) = make_float4(from[4], from[5], from[6], from[7]);
}

// Eight columns of the rows from `first` on, a thread a row. Every thread factors the diagonal block for itself: that
// takes less time than to pass it on. The rows of that block are left as they are, for others still read them: what
// becomes of them is in `over`.
template <int kDim>
__device__ __forceinline__ void factor_panel(Matrix<kDim>& m, int first, float (&over)[kPanel]) {
  const int row = first + static_cast<int>(threadIdx.x);
  if (row > kDim) return;  // row kDim: the right-hand side
  float block[kPanel][kPanel], u[kPanel], limit[kPanel], pivot[kPanel];
#pragma unroll
  for (int i = 0; i < kPanel; ++i) load_eight(block[i], &m.at[first + i][first]);
  load_eight(limit, &m.limit[first]);
  load_eight(u, &m.at[row][first]);
#pragma unroll
  for (int j = 0; j < kPanel; ++j) {
    pivot[j] = block[j][j];
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(pivot[j]));
    inverse = pivot[j] <= limit[j] ? 0.0f : inverse;
    over[j] = u[j] * inverse;
#pragma unroll
    for (int i = j + 1; i < kPanel; ++i) {
      const float l = block[i][j] * inverse;
#pragma unroll
      for (int k = j + 1; k <= i; ++k) block[i][k] = fmaf(-l, block[k][j], block[i][k]);
      u[i] = fmaf(-l, u[j], u[i]);
    }
  }
  if (threadIdx.x == 0) store_eight(&m.pivot[first], pivot);
  if (row >= first + kPanel) {
#pragma unroll
    for (int j = 0; j < kPanel; ++j) m.panel[j][row] = u[j], m.scaled[j][row] = over[j];
    store_eight(&m.at[row][first], over);
  }
}

// What is left loses L D Lᵀ of eight columns, in tiles of 4 x 4. Rows kDim .. kDim + 3: the right-hand side.
template <int kDim>
__device__ __forceinline__ void update_rest(Matrix<kDim>& m, int below) {
  const int tiles = (kDim - below) / 4;
  const int count = tiles * (tiles + 1) / 2 + tiles;
#pragma unroll 1
  for (int t = threadIdx.x; t < count; t += kSolveThreads) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(8.0f * static_cast<float>(t) + 1.0f));
    int tile_row = static_cast<int>((root - 1.0f) * 0.5f);
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

template <int kDim>
__device__ void factor(Matrix<kDim>& m) {
#pragma unroll 1
  for (int first = 0; first < kDim; first += kPanel) {
    float over[kPanel];
    __syncthreads();
    factor_panel(m, first, over);
    __syncthreads();
    if (threadIdx.x < kPanel) store_eight(&m.at[first + threadIdx.x][first], over);
    update_rest(m, first + kPanel);
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

// x = L^-T (the right-hand side's row), by the first warp; the caller puts a barrier after it. A loop, not all of it
// unrolled: instructions that run once cost what it takes to fetch them.
template <int kDim>
__device__ void back_substitute(const Matrix<kDim>& m, float* x) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  for (int d = lane; d < kDim; d += 32) x[d] = m.at[kDim][d];
#pragma unroll 1
  for (int first = kDim - kPanel; first >= 0; first -= kPanel) {
    __syncwarp();
    float solved[kPanel], l[kPanel - 1][kPanel];
    load_eight(solved, &x[first]);
#pragma unroll
    for (int j = 1; j < kPanel; ++j) load_eight(l[j - 1], &m.at[first + j][first]);
#pragma unroll
    for (int j = kPanel - 1; j > 0; --j) {
#pragma unroll
      for (int k = 0; k < j; ++k) solved[k] = fmaf(-l[j - 1][k], solved[j], solved[k]);
    }
#pragma unroll
    for (int e = 0; e < kDim / 32; ++e) {
      const int column = lane + 32 * e;
      if (column >= first) break;
      float left = x[column];
#pragma unroll
      for (int j = 0; j < kPanel; ++j) left = fmaf(-m.at[first + j][column], solved[j], left);
      x[column] = left;
    }
    __syncwarp();
    if (lane == 0) store_eight(&x[first], solved);
  }
}

}  // namespace lla::cuda::sm90::decode
