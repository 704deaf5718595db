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
#ifdef LLA_K
inline constexpr int kUnroll = LLA_K;
#else
inline constexpr int kUnroll = 2;
#endif

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
  // Where the panel's transposed columns have a row: those of a thread, every sixteenth, lie together.
  static constexpr unsigned place(unsigned row) { return row / 64 * 64 + row % kGrid * 4 + row / kGrid % 4; }
  static constexpr int kRhs = kDim;      // row of the right-hand side in `columns`
  static constexpr int kColumnRow = 12;  // floats of a row of them, that no two of eight lie in the same banks

  alignas(16) float lower[row_start(kDim)];
  alignas(16) float columns[(kDim + 1) * kColumnRow];  // of the next panel, as they are
  alignas(16) float panel[kPanel * kDim];              // of the current one, eliminated, transposed
  alignas(16) float scaled[kPanel * kDim];             // and over the pivots
  alignas(16) float right[kPanel];                     // the right-hand side's part, over the pivots
  alignas(16) float rhs[kDim];                         // the right-hand side, in the end D^-1 L^-1 of it
  alignas(16) float start[kDim];                       // the diagonal before anything was taken from it, uncentred
  alignas(16) float limit[kDim];                       // pivots up to this are dropped
  alignas(16) float pivot[kDim];

  constexpr float& at(unsigned row, unsigned column) { return lower[row_start(row) + column]; }
  constexpr const float& at(unsigned row, unsigned column) const { return lower[row_start(row) + column]; }
};

// A pivot at most this part of its start is all rounding: reported.
inline constexpr float kLeastPivot = 0x1p-16f;

// A thread's elements: (row + 16 a, column + 16 b), b <= a; of threads up to kDim one element of the right-hand side.
template <int kDim>
struct Remaining {
  static constexpr int kBlocks = kDim / kGrid;
  float at[kBlocks][kBlocks];
  float rhs;
  unsigned thread, row, column;

  constexpr Remaining(const Matrix<kDim>& m, unsigned thread_)
      : at{}, rhs(0), thread(thread_), row(thread_ / kGrid), column(thread_ % kGrid) {
    const float* const first = &m.at(row, column);
#pragma unroll
    for (int a = 0; a < kBlocks; ++a) {
#pragma unroll
      for (int b = 0; b <= a; ++b) {
        // On the diagonal what is above it has no place and is never looked at.
        // row_start(row + 16 a) = row_start(row) + 16 a row + 128 a (a + 1)
        if (a > b || column <= row) at[a][b] = first[kGrid * a * row + 128 * a * (a + 1) + kGrid * b];
      }
    }
    if (thread < kDim) rhs = m.rhs[thread];
  }

  // The columns of a panel, by those who have them.
  constexpr void publish(Matrix<kDim>& m, unsigned panel) const {
    if (thread < kDim && thread / kPanel == panel) column_of(m, Matrix<kDim>::kRhs, thread % kPanel) = rhs;
    if (column / kPanel != panel % 2) return;
#pragma unroll
    for (unsigned b = 0; b < kBlocks; ++b) {
      if (b != panel / 2) continue;
#pragma unroll
      for (unsigned a = b; a < kBlocks; ++a) column_of(m, row + kGrid * a, column % kPanel) = at[a][b];
    }
  }

  // Takes L D Lᵀ of a panel off what is behind it.
  constexpr void update(const Matrix<kDim>& m, unsigned panel) {
    switch ((panel + 1) / 2) {  // block of columns that is not done
      case 0: update_from<0>(m); break;
      case 1: update_from<1>(m); break;
      case 2: update_from<2>(m); break;
      case 3: update_from<3>(m); break;
      case 4: update_from<4>(m); break;
      case 5: update_from<5>(m); break;
      case 6: update_from<6>(m); break;
      default: update_from<7>(m);
    }
    if (thread >= kDim) return;
    float right[kPanel]{};
    load_eight(right, m.right);
    const float* const mine = &m.panel[Matrix<kDim>::place(thread)];
#pragma unroll
    for (int k = 0; k < kPanel; ++k) rhs -= right[k] * mine[k * kDim];
  }

 private:
  static constexpr float& column_of(Matrix<kDim>& m, unsigned row, unsigned j) {
    return m.columns[row * Matrix<kDim>::kColumnRow + j];
  }

  template <int first>
  constexpr void update_from(const Matrix<kDim>& m) {
    if constexpr (first < kBlocks) {
#pragma unroll kUnroll
      for (unsigned k = 0; k < kPanel; ++k) {
        float l[kBlocks]{}, u[kBlocks]{};
#pragma unroll
        for (int half = first / 4; half < kBlocks / 4; ++half) {
          const unsigned from = k * kDim + 64 * half;
          const Four x = load_four(&m.scaled[from + 4 * row]), y = load_four(&m.panel[from + 4 * column]);
#pragma unroll
          for (int i = 0; i < 4; ++i) l[4 * half + i] = x.at[i], u[4 * half + i] = y.at[i];
        }
#pragma unroll
        for (int b = first; b < kBlocks; ++b) {
#pragma unroll
          for (int a = b; a < kBlocks; ++a) at[a][b] -= l[a] * u[b];
        }
      }
    }
  }
};

// Eliminates a panel's columns in the thread-th row from its first on, behind the last in the right-hand side. Every
// thread factors the panel's diagonal block for itself: that takes less time than to pass it on.
template <int kDim, class Inverse>
constexpr void eliminate_panel(Matrix<kDim>& m, unsigned panel, unsigned thread, const Inverse& inverse_of) {
  const unsigned first = kPanel * panel, row = first + thread;
  constexpr unsigned kRow = Matrix<kDim>::kColumnRow;
  if (row > kDim) return;
  float block[kPanel][kPanel]{}, u[kPanel]{}, over[kPanel]{}, limit[kPanel]{}, pivot[kPanel]{};
#pragma unroll
  for (int i = 0; i < kPanel; ++i) load_eight(block[i], &m.columns[(first + i) * kRow]);
  load_eight(limit, &m.limit[first]);
  load_eight(u, &m.columns[row * kRow]);
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
  if (thread == 0) store_eight(&m.pivot[first], pivot);
  if (row == kDim) {
    store_eight(m.right, over);
    store_eight(&m.rhs[first], over);
    return;
  }
  store_eight(&m.at(row, first), over);
  if (thread < kPanel) return;
  const unsigned at = Matrix<kDim>::place(row);
#pragma unroll
  for (int k = 0; k < kPanel; ++k) m.panel[k * kDim + at] = u[k], m.scaled[k * kDim + at] = over[k];
}

}  // namespace lla::cuda::sm90::decode
