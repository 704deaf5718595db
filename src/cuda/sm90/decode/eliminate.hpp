// LDLᵀ of a symmetric matrix by the 256 threads of a block, in fp32, pivots guarded. Every step is a plain function of
// one thread: the kernel puts barriers between them (factor.cuh), a test runs them on the CPU.
//
// What is yet to be eliminated is in registers: thread (i % 16, j % 16) has element (i, j) of the lower triangle. Eight
// columns at a time, a panel, go through shared memory: those who have them publish them, the thread of each row
// eliminates them within its row, and all threads take what follows off their own elements.
#pragma once

#include <bit>
#include <cstdint>

namespace lla::cuda::sm90::decode {

inline constexpr int kSolveThreads = 256;
inline constexpr int kPanel = 8;
inline constexpr int kGrid = 16;  // threads along a side of the matrix

struct alignas(16) Four {
  float at[4];
};
constexpr Four load_four(const float* from) { return *reinterpret_cast<const Four*>(from); }
constexpr void load_eight(float (&to)[kPanel], const float* from) {
  const Four a = load_four(from), b = load_four(from + 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = a.at[i], to[4 + i] = b.at[i];
}
constexpr void store_eight(float* to, const float (&from)[kPanel]) {
  Four* const fours = reinterpret_cast<Four*>(to);
  fours[0] = {from[0], from[1], from[2], from[3]};
  fours[1] = {from[4], from[5], from[6], from[7]};
}

template <int kDim>
struct Matrix {
  // Rows of the lower triangle, each with its whole last panel and four floats more, so that no two of eight rows lie
  // in the same banks. First the matrix, in the end L.
  static constexpr unsigned row_start(unsigned row) {
    const unsigned panel = row / kPanel;
    return 32 * panel * (panel + 2) + row % kPanel * (8 * panel + 12);
  }
  static constexpr unsigned kRhs = kDim;      // row of the right-hand side among the columns
  static constexpr unsigned kColumnRow = 12;  // floats of a row of them, that no two of eight lie in the same banks

  alignas(16) float lower[row_start(kDim)];
  // Of a panel: as published, then but for its first eight rows eliminated. Every other panel has the same.
  alignas(16) float columns[2][(kDim + 1) * kColumnRow];
  alignas(16) float right[kPanel];  // the right-hand side's part, over the pivots
  alignas(16) float rhs[kDim];      // the right-hand side, in the end D^-1 L^-1 of it
  alignas(16) float scale[kDim];    // of rows and columns, for products of two pivots to stay in range
  alignas(16) float start[kDim];    // the diagonal before anything was taken from it, uncentred
  alignas(16) float limit[kDim];    // pivots up to this are dropped
  alignas(16) float pivot[kDim];

  constexpr float& at(unsigned row, unsigned column) { return lower[row_start(row) + column]; }
  constexpr const float& at(unsigned row, unsigned column) const { return lower[row_start(row) + column]; }
};

// The power of two whose square brings a diagonal element to [1, 4).
constexpr float diagonal_scale(float start) {
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(start) >> 23 & 0xff) - 127;
  return std::bit_cast<float>(static_cast<uint32_t>(127 - (exponent >> 1)) << 23);
}

// A pivot at most this part of its start is all rounding: reported.
inline constexpr float kLeastPivot = 0x1p-16f;

// A thread's elements: (row + 16 a, column + 16 b), b <= a; of threads up to kDim one element of the right-hand side.
template <int kDim>
struct Remaining {
  static constexpr unsigned kBlocks = kDim / kGrid;
  float at[kBlocks][kBlocks];
  float rhs;
  unsigned thread, row, column;

  // The matrix is as it came, right-hand side and limits are scaled already.
  constexpr Remaining(const Matrix<kDim>& m, unsigned thread_)
      : at{}, rhs(0), thread(thread_), row(thread_ / kGrid), column(thread_ % kGrid) {
    const float* const first = &m.at(row, column);
#pragma unroll
    for (unsigned a = 0; a < kBlocks; ++a) {
#pragma unroll
      for (unsigned b = 0; b <= a; ++b) {
        // On the diagonal what is above it has no place and is never looked at.
        if (a > b || column <= row)
          at[a][b] = first[row_distance(a) + kGrid * b] * m.scale[row + kGrid * a] * m.scale[column + kGrid * b];
      }
    }
    if (thread < kDim) rhs = m.rhs[thread];
  }

  // The first panel's columns, by those who have them.
  constexpr void publish(Matrix<kDim>& m) const { publish_block<0>(m, 0); }

  // Takes L D Lᵀ of a panel off what is behind it, and publishes the next panel. The same instructions for all panels,
  // so that they need not be fetched again.
  constexpr void update(Matrix<kDim>& m, unsigned panel) {
    if (thread < kDim) {
      float right[kPanel]{}, mine[kPanel]{};
      load_eight(right, m.right);
      load_eight(mine, &m.columns[panel % 2][thread * kRow]);
#pragma unroll
      for (int k = 0; k < kPanel; ++k) rhs -= right[k] * mine[k];
    }
    const unsigned first = (panel + 1) / 2;  // block of columns that is not done
    const float* const l_first = &m.at(row, kPanel * panel);
    const float* const u_first = &m.columns[panel % 2][column * kRow];
#pragma unroll 1
    for (unsigned k = 0; k < kPanel; k += 4) {
      Four l[kBlocks]{};  // of rows that are done: whatever lies there, for nobody
#pragma unroll
      for (unsigned a = 0; a < kBlocks; ++a) l[a] = load_four(l_first + row_distance(a) + k);
      const auto block = [&]<int b>() {
        if constexpr (b < kBlocks) {
          const Four u = load_four(u_first + kGrid * kRow * b + k);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (unsigned a = b; a < kBlocks; ++a) at[a][b] -= l[a].at[e] * u.at[e];
          }
          if (k > 0 && b == first) publish_block<b>(m, panel + 1);
        }
      };
      if (first < 4) {
        if (first < 2) {
          if (first < 1) block.template operator()<0>();
          block.template operator()<1>();
        }
        if (first < 3) block.template operator()<2>();
        block.template operator()<3>();
      }
      if (first < 6) {
        if (first < 5) block.template operator()<4>();
        block.template operator()<5>();
      }
      if (first < 7) block.template operator()<6>();
      block.template operator()<7>();
    }
  }

 private:
  static constexpr unsigned kRow = Matrix<kDim>::kColumnRow;

  template <int block>
  constexpr void publish_block(Matrix<kDim>& m, unsigned panel) const {
    float* const to = m.columns[panel % 2];
    if (thread < kDim && thread / kPanel == panel) to[Matrix<kDim>::kRhs * kRow + thread % kPanel] = rhs;
    if (column / kPanel != panel % 2) return;
#pragma unroll
    for (unsigned a = block; a < kBlocks; ++a) to[(row + kGrid * a) * kRow + column % kPanel] = at[a][block];
  }

  // row_start(row + 16 a) - row_start(row)
  constexpr unsigned row_distance(unsigned a) const { return kGrid * a * row + 128 * a * (a + 1); }
};

// Eliminates a panel's columns in the thread-th row from its first on, behind the last in the right-hand side. Every
// thread factors the panel's diagonal block for itself: that takes less time than to pass it on.
template <int kDim, class Inverse>
constexpr void eliminate_panel(Matrix<kDim>& m, unsigned panel, unsigned thread, const Inverse& inverse_of) {
  const unsigned first = kPanel * panel, row = first + thread;
  float* const columns = m.columns[panel % 2];
  constexpr unsigned kRow = Matrix<kDim>::kColumnRow;
  if (row > kDim) return;
  float block[kPanel][kPanel]{}, u[kPanel]{}, over[kPanel]{}, limit[kPanel]{}, pivot[kPanel]{};
#pragma unroll
  for (int i = 0; i < kPanel; ++i) load_eight(block[i], &columns[(first + i) * kRow]);
  load_eight(limit, &m.limit[first]);
  load_eight(u, &columns[row * kRow]);
  const auto eliminate = [&](int j, float inverse) {
    pivot[j] = block[j][j];
    over[j] = u[j] * inverse;
#pragma unroll
    for (int i = j + 1; i < kPanel; ++i) {
      const float l = block[i][j] * inverse;
#pragma unroll
      for (int k = j + 1; k <= i; ++k) block[i][k] -= l * block[k][j];
      u[i] -= l * u[j];
    }
  };
  // One reciprocal after the other is what takes time. The second of two pivots is their determinant over the first:
  // its reciprocal need not wait for the first's.
#pragma unroll
  for (int j = 0; j < kPanel; j += 2) {
    const bool drop_first = block[j][j] <= limit[j];
    const float a = drop_first ? 1.0f : block[j][j], b = drop_first ? 0.0f : block[j + 1][j];
    const float determinant = a * block[j + 1][j + 1] - b * b;
    const bool drop_second = determinant <= limit[j + 1] * a;
    const float over_a = inverse_of(a), over_determinant = inverse_of(determinant);
    eliminate(j, drop_first ? 0.0f : over_a);
    eliminate(j + 1, drop_second ? 0.0f : a * over_determinant);
  }
  if (thread == 0) store_eight(&m.pivot[first], pivot);
  if (row == kDim) {
    store_eight(m.right, over);
    store_eight(&m.rhs[first], over);
    return;
  }
  store_eight(&m.at(row, first), over);
  if (thread >= kPanel) store_eight(&columns[row * kRow], u);
}

}  // namespace lla::cuda::sm90::decode
