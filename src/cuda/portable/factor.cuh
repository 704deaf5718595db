// LDL^T of a small symmetric matrix by one block, in double, pivots guarded; and the solve that comes with it.
#pragma once

#include "cuda/portable/config.hpp"
#include "cuda/portable/rows.cuh"

namespace lla::cuda::portable {

// The lower triangle, row after row. Rows [dim, dim + 4) follow the matrix: the first of them is the right-hand side,
// which the elimination turns into D^-1 L^-1 b on its way.
struct Triangle {
  double* data;

  __device__ double& at(int row, int column) const { return data[row * (row + 1) / 2 + column]; }
};

// Tile (row, column) of the lower triangle of 4 x 4 tiles, counted row by row.
__device__ inline void triangle_tile(int index, int& row, int& column) {
  row = static_cast<int>((sqrtf(8.0f * static_cast<float>(index) + 1.0f) - 1.0f) * 0.5f);
  if (row * (row + 1) / 2 > index) --row;
  if ((row + 1) * (row + 2) / 2 <= index) ++row;
  column = index - row * (row + 1) / 2;
}

__device__ inline double warp_sum(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// matrix = factor matrix + the sum of weight(b) k_b k_bᵀ over the rows of a tile of keys, `dim` channels of them and
// 16-byte aligned. All threads of the block take part, each entry is one thread's. kUnroll: keys at once, all where
// their weights are in registers.
template <int kUnroll, class Weight>
__device__ void add_products(Triangle matrix, const double* tile, int stride, int dim, double factor, Weight weight) {
  const int tiles = dim / 4;
  for (int t = threadIdx.x; t < tiles * (tiles + 1) / 2; t += DirectConfig::kThreads) {
    int tile_row, tile_column;
    triangle_tile(t, tile_row, tile_column);
    double acc[4][4] = {};
#pragma unroll kUnroll
    for (int b = 0; b < DirectConfig::kKeys; ++b) {
      const double2* const k = reinterpret_cast<const double2*>(tile + b * stride);
      const double2 u0 = k[2 * tile_row], u1 = k[2 * tile_row + 1];
      const double2 v0 = k[2 * tile_column], v1 = k[2 * tile_column + 1];
      const double u[4] = {weight(b) * u0.x, weight(b) * u0.y, weight(b) * u1.x, weight(b) * u1.y};
      const double v[4] = {v0.x, v0.y, v1.x, v1.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] += u[i] * v[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (4 * tile_row + i < 4 * tile_column + j) continue;
        double& entry = matrix.at(4 * tile_row + i, 4 * tile_column + j);
        entry = entry * factor + acc[i][j];
      }
    }
  }
}

// Sums over keys, and how they are padded.
struct MatrixSums {
  int dim, padded;
  double omega;
  int64_t keys;
};

// From sums about a centre to A, its right-hand side behind it, and what rounding alone can make of a pivot. `mean` is
// relative to the centre. ridge(d) is asked for by any thread, rhs(d) and mean_key(d), the mean of the keys as they
// were given, by thread d. All threads of the block take part.
template <class MeanKey, class Ridge, class Rhs>
__device__ void finish_matrix(Triangle matrix, const MatrixSums& sums, const double* mean, double* smallest,
                              MeanKey mean_key, Ridge ridge, Rhs rhs) {
  const int d = threadIdx.x;
  if (d < sums.padded) {
    constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
    const bool removed = d >= sums.dim || removes(ridge(d));
    // Rounding: of the elimination, which is relative to the sums A started from, and of the mean key.
    const double mean_error = static_cast<double>(sums.keys) * kEpsilon * (removed ? 0 : mean_key(d));
    const double start = matrix.at(d, d) / sums.omega + (removed ? 1 : ridge(d));
    smallest[d] = fmax(sums.padded * kEpsilon * start, mean_error * mean_error);
    matrix.at(sums.padded, d) = removed ? 0 : rhs(d);
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < sums.padded; i += blockDim.x / 32) {
    const bool row_removed = i >= sums.dim || removes(ridge(i));
    for (int j = threadIdx.x % 32; j <= i; j += 32) {
      double& entry = matrix.at(i, j);
      const bool removed = row_removed || removes(ridge(j));
      const double covariance = entry / sums.omega - mean[i] * mean[j];
      entry = removed ? (i == j ? 1 : 0) : covariance + (i == j ? ridge(i) : 0);
    }
  }
}

// Four columns' worth of elimination: the diagonal tile, factored by every thread for itself.
struct Panel {
  double lower[4][4];
  double inverse[4];  // of the pivots; 0 where the pivot says nothing
  bool skipped = false;

  // smallest[i]: what rounding alone can make of pivot i.
  __device__ Panel(Triangle m, int first, const double* smallest) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) lower[i][j] = m.at(first + i, first + j);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const double pivot = lower[j][j];
      const bool usable = pivot > smallest[first + j];
      skipped |= !usable;
      inverse[j] = usable ? 1 / pivot : 0;
#pragma unroll
      for (int i = j + 1; i < 4; ++i) {
        const double unscaled = lower[i][j];
        lower[i][j] = unscaled * inverse[j];
#pragma unroll
        for (int e = j + 1; e <= i; ++e) lower[i][e] -= unscaled * lower[e][j];
      }
    }
  }
};

// Eliminates all `dim` columns (a multiple of 4); panel_rows is scratch for 4 (dim + 4) values. Says whether a pivot
// was skipped. All threads of the block take part.
__device__ inline bool factor(Triangle m, int dim, const double* smallest, double* panel_rows) {
  const int rows = dim + 4;
  bool skipped = false;
  for (int first = 0; first < dim; first += 4) {
    __syncthreads();
    const Panel panel(m, first, smallest);
    skipped |= panel.skipped;
    __syncthreads();  // everyone has read the diagonal tile
    for (int row = first + threadIdx.x; row < rows; row += blockDim.x) {
      if (row < first + 4) {
#pragma unroll
        for (int i = 1; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < i; ++j) {
            if (row == first + i) m.at(row, first + j) = panel.lower[i][j];
          }
        }
        continue;
      }
      double u[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u[j] = m.at(row, first + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (e < j) u[j] -= u[e] * panel.lower[j][e];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        panel_rows[4 * row + j] = u[j];
        m.at(row, first + j) = u[j] * panel.inverse[j];
      }
    }
    __syncthreads();
    // What is left of the matrix loses L D L^T of these columns. The right-hand side's own corner is never used.
    const int base = first + 4;
    const int tiles = (rows - base) / 4;
    for (int t = threadIdx.x; t < tiles * (tiles + 1) / 2; t += blockDim.x) {
      int tile_row, tile_column;
      triangle_tile(t, tile_row, tile_column);
      const int row = base + 4 * tile_row, column = base + 4 * tile_column;
      if (column >= dim) continue;
      double l[4][4], u[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          l[i][j] = m.at(row + i, first + j);
          u[i][j] = panel_rows[4 * (column + i) + j];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (row + i < column + c) continue;
          double sum = m.at(row + i, column + c);
#pragma unroll
          for (int j = 0; j < 4; ++j) sum -= l[i][j] * u[c][j];
          m.at(row + i, column + c) = sum;
        }
      }
    }
  }
  __syncthreads();
  return skipped;
}

// x = L^-T (row `dim` of the factored triangle), by the first warp; the caller puts a barrier after it.
__device__ inline void back_substitute(Triangle m, int dim, double* x) {
  if (threadIdx.x >= 32) return;
  constexpr int kPerLane = kLargestDim / 32;
  double left[kPerLane];  // element lane + 32 i
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int at = threadIdx.x + 32 * i;
    left[i] = at < dim ? m.at(dim, at) : 0;
  }
#pragma unroll
  for (int i = kPerLane - 1; i >= 0; --i) {
    for (int lane = 31; lane >= 0; --lane) {
      const int j = lane + 32 * i;
      if (j >= dim) continue;
      const double solved = __shfl_sync(~0u, left[i], lane);
#pragma unroll
      for (int e = 0; e <= i; ++e) {
        const int at = threadIdx.x + 32 * e;
        if (at < j) left[e] -= m.at(j, at) * solved;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int at = threadIdx.x + 32 * i;
    if (at < dim) x[at] = left[i];
  }
}

}  // namespace lla::cuda::portable
