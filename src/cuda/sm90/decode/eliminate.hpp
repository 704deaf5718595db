// LDLᵀ of a symmetric matrix by the 256 threads of a block, in fp32, pivots guarded. Every step is a plain function of
// one thread: the kernel puts barriers between them (factor.cuh), a test runs them on the CPU.
//
// What is yet to be eliminated is in registers, sixteenth by sixteenth: thread (i % 16, j % 16) has element (i, j) of
// the lower triangle. Eight columns at a time, a panel, go through shared memory: those who have them publish them, the
// thread of each row eliminates them within its row, and all threads take what follows off their own elements.
#pragma once

namespace lla::cuda::sm90::decode {

inline constexpr int kSolveThreads = 256;
inline constexpr int kPanel = 8;
inline constexpr int kGrid = 16;  // threads along a side of the matrix

struct alignas(16) Four {
  float at[4];
};
constexpr void load_eight(float (&to)[kPanel], const Four* from) {
  const Four a = from[0], b = from[1];
  for (int i = 0; i < 4; ++i) to[i] = a.at[i], to[4 + i] = b.at[i];
}
constexpr void store_eight(Four* to, const float (&from)[kPanel]) {
  to[0] = {from[0], from[1], from[2], from[3]};
  to[1] = {from[4], from[5], from[6], from[7]};
}

template <int kDim>
struct Matrix {
  // Rows of the lower triangle, each with its whole last panel and four floats more, so that no two of eight rows lie
  // in the same banks. First the matrix, in the end L.
  static constexpr int row_start(int row) {
    const int panels = row / kPanel + 1;
    return 4 * kPanel * (panels - 1) * panels + kPanel * (row % kPanel) * panels + 4 * row;
  }
  // Where the panel's transposed columns have a row: those of a thread, every sixteenth, lie together.
  static constexpr int place(int row) { return row / 64 * 64 + row % kGrid * 4 + row / kGrid % 4; }
  static constexpr int kRhs = kDim;  // row of the right-hand side in `columns`

  Four lower[row_start(kDim) / 4];
  Four columns[kDim + 1][3];          // of the next panel, as they are
  Four panel[kPanel][kDim / 4];       // of the current one, eliminated, transposed
  Four scaled[kPanel][kDim / 4];      // and over the pivots
  Four right[2];                      // the right-hand side's part, over the pivots
  Four rhs[kDim / 4];                 // the right-hand side, in the end D^-1 L^-1 of it
  float start[kDim];                  // the diagonal before anything was taken from it, uncentred
  Four limit[kDim / 4];               // pivots up to this are dropped
  Four pivot[kDim / 4];

  constexpr float& at(int row, int column) {
    const int i = row_start(row) + column;
    return lower[i / 4].at[i % 4];
  }
  constexpr const float& at(int row, int column) const {
    const int i = row_start(row) + column;
    return lower[i / 4].at[i % 4];
  }
};

// A pivot at most this part of its start is all rounding: reported.
inline constexpr float kLeastPivot = 0x1p-16f;

// A thread's elements: (row + 16 a, column + 16 b), b <= a; of threads up to kDim one element of the right-hand side.
template <int kDim>
struct Remaining {
  static constexpr int kBlocks = kDim / kGrid;
  float at[kBlocks][kBlocks];
  float rhs;
  int thread, row, column;

  constexpr Remaining(const Matrix<kDim>& m, int thread_)
      : at{}, rhs(0), thread(thread_), row(thread_ / kGrid), column(thread_ % kGrid) {
#pragma unroll
    for (int a = 0; a < kBlocks; ++a) {
#pragma unroll
      for (int b = 0; b <= a; ++b) {
        // On the diagonal what is above it has no place and is never looked at.
        if (a > b || column <= row) at[a][b] = m.at(row + kGrid * a, column + kGrid * b);
      }
    }
    if (thread < kDim) rhs = m.rhs[thread / 4].at[thread % 4];
  }

  // The columns of a panel, by those who have them.
  constexpr void publish(Matrix<kDim>& m, int panel) const {
    if (thread < kDim && thread / kPanel == panel) column_of(m, Matrix<kDim>::kRhs, thread % kPanel) = rhs;
    if (column / kPanel != panel % 2) return;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b != panel / 2) continue;
#pragma unroll
      for (int a = b; a < kBlocks; ++a) column_of(m, row + kGrid * a, column % kPanel) = at[a][b];
    }
  }

  // Takes L D Lᵀ of a panel off what is behind it.
  constexpr void update(const Matrix<kDim>& m, int panel) {
    const int first = (panel + 1) / 2;  // block of columns that is not done
#pragma unroll 1
    for (int k = 0; k < kPanel; k += 2) {
      float l[2][kBlocks]{}, u[2][kBlocks]{};
#pragma unroll
      for (int half = 0; half < kBlocks / 4; ++half) {
        if (4 * half + 3 < first) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Four x = m.scaled[k + e][16 * half + row], y = m.panel[k + e][16 * half + column];
#pragma unroll
          for (int i = 0; i < 4; ++i) l[e][4 * half + i] = x.at[i], u[e][4 * half + i] = y.at[i];
        }
      }
      switch (first) {  // each block of columns, and those behind it
        case 0: subtract<0>(l, u); [[fallthrough]];
        case 1: subtract<1>(l, u); [[fallthrough]];
        case 2: subtract<2>(l, u); [[fallthrough]];
        case 3: subtract<3>(l, u); [[fallthrough]];
        case 4: subtract<4>(l, u); [[fallthrough]];
        case 5: subtract<5>(l, u); [[fallthrough]];
        case 6: subtract<6>(l, u); [[fallthrough]];
        default: subtract<7>(l, u);
      }
    }
    if (thread >= kDim) return;
    float right[kPanel]{};
    load_eight(right, m.right);
    const int at_row = Matrix<kDim>::place(thread);
#pragma unroll
    for (int k = 0; k < kPanel; ++k) rhs -= right[k] * m.panel[k][at_row / 4].at[at_row % 4];
  }

 private:
  static constexpr float& column_of(Matrix<kDim>& m, int row, int j) { return m.columns[row][j / 4].at[j % 4]; }

  template <int b>
  constexpr void subtract(const float (&l)[2][kBlocks], const float (&u)[2][kBlocks]) {
    if constexpr (b < kBlocks) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int a = b; a < kBlocks; ++a) at[a][b] -= l[e][a] * u[e][b];
      }
    }
  }
};

// Eliminates a panel's columns in the thread-th row from its first on, behind the last in the right-hand side. Every
// thread factors the panel's diagonal block for itself: that takes less time than to pass it on.
template <int kDim, class Inverse>
constexpr void eliminate_panel(Matrix<kDim>& m, int panel, int thread, const Inverse& inverse_of) {
  const int first = kPanel * panel, row = first + thread;
  if (row > kDim) return;
  float block[kPanel][kPanel]{}, u[kPanel]{}, over[kPanel]{}, limit[kPanel]{}, pivot[kPanel]{};
#pragma unroll
  for (int i = 0; i < kPanel; ++i) load_eight(block[i], m.columns[first + i]);
  load_eight(limit, &m.limit[first / 4]);
  load_eight(u, m.columns[row]);
#pragma unroll
  for (int j = 0; j < kPanel; ++j) {
    pivot[j] = block[j][j];
    const float any = inverse_of(pivot[j]), inverse = pivot[j] <= limit[j] ? 0.0f : any;
    over[j] = u[j] * inverse;
#pragma unroll
    for (int i = j + 1; i < kPanel; ++i) {
      const float l = block[i][j] * inverse;
#pragma unroll
      for (int k = j + 1; k <= i; ++k) block[i][k] -= l * block[k][j];
      u[i] -= l * u[j];
    }
  }
  if (thread == 0) store_eight(&m.pivot[first / 4], pivot);
  if (row == kDim) {
    store_eight(m.right, over);
    store_eight(&m.rhs[first / 4], over);
    return;
  }
  store_eight(&m.lower[(Matrix<kDim>::row_start(row) + first) / 4], over);
  if (thread < kPanel) return;
  const int at = Matrix<kDim>::place(row);
#pragma unroll
  for (int k = 0; k < kPanel; ++k) {
    m.panel[k][at / 4].at[at % 4] = u[k];
    m.scaled[k][at / 4].at[at % 4] = over[k];
  }
}

}  // namespace lla::cuda::sm90::decode
