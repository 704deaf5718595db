// LDLᵀ of a symmetric matrix by a block, in fp32, pivots guarded. Every step is a plain function of one thread: the kernel
// puts barriers between them (factor.cuh), a test runs them on the CPU.
//
// Eight columns at a time, a panel, go through shared memory: who has them publishes them, the thread of each row
// eliminates them within its row (RowElimination). What is yet to be eliminated is in registers of four other warps, as
// tensor cores hold it, in tiles of 16 rows and 8 columns (Tiles): they take a panel off the next one first, publish it,
// and off the rest while that one is being eliminated. A number of fp32 is the sum of two that tensor cores take (TF32),
// so a product is three of theirs; what they leave is added to the rest in fp32, for they cut sums off.
#pragma once

#include <bit>
#include <cstdint>

namespace lla::cuda::sm90::decode {

inline constexpr int kSolveThreads = 256;
inline constexpr int kPanel = 8;
inline constexpr int kTileRows = 16;  // its columns are a panel's
inline constexpr int kTileWarps = 4;  // that have tiles; the others before them have rows

// What is stored as twos is loaded as fours: to the compiler they may be the same place.
template <int kCount>
struct [[gnu::may_alias]] alignas(4 * kCount) Floats {
  float at[kCount];
};
using Two = Floats<2>;
using Four = Floats<4>;
// (Templates, as no compiler minds a constexpr one that is never evaluated while compiling.)
template <class Several, class Float>
constexpr Several load_floats(const Float* from) {
  return *reinterpret_cast<const Several*>(from);
}
template <class Several, class Float>
constexpr void store_floats(Float* to, const Several& from) {
  *reinterpret_cast<Several*>(to) = from;
}
template <class Float>
constexpr void load_halves(float (&to)[kPanel], const Float* first, const Float* second) {
  const Four a = load_floats<Four>(first), b = load_floats<Four>(second);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = a.at[i], to[4 + i] = b.at[i];
}
template <class Float>
constexpr void load_eight(float (&to)[kPanel], const Float* from) {
  load_halves(to, from, from + 4);
}
template <class Float>
constexpr void store_eight(Float* to, const float (&from)[kPanel]) {
  store_floats(to, Four{from[0], from[1], from[2], from[3]});
  store_floats(to + 4, Four{from[4], from[5], from[6], from[7]});
}

// Where the rows of a panel lie in shared memory: close together, and every other four with their halves exchanged, so
// that neither threads with a row each nor the lanes of a tile meet in a bank. Eight rows on it is the same.
struct PanelRow {
  static constexpr unsigned half(unsigned row, unsigned column) {
    return row * kPanel + ((column / 4) ^ (row / 4 % 2)) * 4;
  }
  static constexpr unsigned at(unsigned row, unsigned column) { return half(row, column) + column % 4; }
};
template <class Float>
constexpr void load_row(float (&to)[kPanel], const Float* panel, unsigned row) {
  load_halves(to, panel + PanelRow::half(row, 0), panel + PanelRow::half(row, 4));
}

// The nearest number of eleven digits. The rest has twelve at most, of which tensor cores cut one off.
constexpr float leading_part(float x) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000u) & 0xffffe000u);
}

// Rows of a panel in two parts. `ldmatrix` takes four floats for a row of eight numbers of 16 bits, and gives every lane
// the one that an operand of TF32 wants; which row a lane names:
template <int kDim>
struct Operand {
  alignas(16) float leading[kDim * kPanel], rest[kDim * kPanel];  // PanelRow

  // Of sixteen rows.
  static constexpr unsigned left_place(unsigned lane) { return PanelRow::half(lane % 16, lane / 16 * 4); }
  // Of eight; lanes from 16 on of their rests.
  static constexpr unsigned right_place(unsigned lane) { return PanelRow::half(lane % 8, lane / 8 % 2 * 4); }

  constexpr void put(unsigned row, const float (&x)[kPanel]) {
#pragma unroll
    for (int i = 0; i < kPanel; i += 4) {
      Four a{}, b{};
#pragma unroll
      for (int e = 0; e < 4; ++e) a.at[e] = leading_part(x[i + e]), b.at[e] = x[i + e] - a.at[e];
      store_floats(leading + PanelRow::half(row, i), a);
      store_floats(rest + PanelRow::half(row, i), b);
    }
  }
};

template <int kDim>
struct Matrix {
  // Rows of the lower triangle, each with its whole last panel and four floats more, so that no two of eight rows lie
  // in the same banks. First the matrix, in the end L.
  static constexpr unsigned row_floats(unsigned panel) { return kPanel * panel + 12; }
  static constexpr unsigned row_start(unsigned row) {
    const unsigned panel = row / kPanel;
    return 32 * panel * (panel + 2) + row % kPanel * row_floats(panel);
  }

  alignas(16) float lower[row_start(kDim)];
  alignas(16) float columns[kDim * kPanel];  // of a panel, as published (PanelRow)
  Operand<kDim> l[2], u[2];                  // of a panel, eliminated: over the pivots, and not. Panels take turns
  alignas(16) float right[2][kPanel];        // the right-hand side's part of a panel
  alignas(16) float rhs[kDim];               // the right-hand side, in the end D^-1 L^-1 of it
  alignas(16) float start[kDim];             // the diagonal before anything was taken from it, uncentred
  alignas(16) float limit[kDim];             // pivots up to this are dropped
  alignas(16) float pivot[kDim];

  constexpr float& at(unsigned row, unsigned column) { return lower[row_start(row) + column]; }
  constexpr const float& at(unsigned row, unsigned column) const { return lower[row_start(row) + column]; }
};

// A pivot at most this part of its start is all rounding: reported.
inline constexpr float kLeastPivot = 0x1p-16f;

// A row, by the thread of its number: of the matrix it eliminates its part of a panel, of the right-hand side it has an
// element.
template <int kDim>
struct RowElimination {
  unsigned row;
  float rhs;

  constexpr RowElimination(const Matrix<kDim>& m, unsigned thread) : row(thread), rhs(m.rhs[thread]) {}

  constexpr void publish(Matrix<kDim>& m, unsigned panel) const {
    if (row / kPanel == panel) m.right[panel % 2][row % kPanel] = rhs;
  }

  // Every thread factors the panel's diagonal block, and solves for the right-hand side's part, for itself: that takes
  // less time than to pass it on.
  template <class Inverse>
  constexpr void eliminate(Matrix<kDim>& m, unsigned panel, const Inverse& inverse_of) {
    const unsigned first = kPanel * panel;
    if (row < first) return;
    float block[kPanel][kPanel]{}, u[kPanel]{}, over[kPanel]{}, right[kPanel]{}, limit[kPanel]{};
#pragma unroll
    for (int i = 0; i < kPanel; ++i) load_row(block[i], m.columns, first + i);
    load_eight(limit, &m.limit[first]);
    load_eight(right, m.right[panel % 2]);
    load_row(u, m.columns, row);
#pragma unroll
    for (int j = 0; j < kPanel; ++j) {
      const float pivot = block[j][j], any = inverse_of(pivot), inverse = pivot <= limit[j] ? 0.0f : any;
      if (row == first) m.pivot[first + j] = pivot, m.rhs[first + j] = right[j] * inverse;
      over[j] = u[j] * inverse;
#pragma unroll
      for (int i = j + 1; i < kPanel; ++i) {
        const float l = block[i][j] * inverse;
#pragma unroll
        for (int k = j + 1; k <= i; ++k) block[i][k] -= l * block[k][j];
        u[i] -= l * u[j];
        right[i] -= l * right[j];
      }
      rhs -= over[j] * right[j];
    }
    store_eight(&m.at(row, first), over);
    m.l[panel % 2].put(row, over);
    m.u[panel % 2].put(row, u);
  }
};

// Tiles of the lower triangle, by four warps, each with every fourth column of them: of a tile a lane has rows g and g + 8,
// columns 2 t and 2 t + 1. `Products` is how a warp multiplies: it reads a lane's part of 16 rows of l and of 8 rows of
// u, and takes the lane's four elements of their product off a tile, of two tiles in a column.
template <int kDim>
struct Tiles {
  static constexpr unsigned kStrips = kDim / kTileRows, kColumns = kDim / kPanel / kTileWarps;
  static constexpr unsigned first_strip(unsigned column) { return 2 * column; }
  float at[kColumns][kStrips][4];
  unsigned warp, lane;

  constexpr Tiles(const Matrix<kDim>& m, unsigned thread) : at{}, warp(thread / 32), lane(thread % 32) {
#pragma unroll
    for (unsigned c = 0; c < kColumns; ++c) {
#pragma unroll
      for (unsigned i = first_strip(c); i < kStrips; ++i) {
#pragma unroll
        for (unsigned e = 0; e < 4; e += 2) {
          // What is above the diagonal has no place, or nothing in it, and is never looked at.
          const unsigned row = row_of(i, e), column = kPanel * panel_of(c) + lane % 4 * 2;
          const Two two = column <= row ? load_floats<Two>(&m.at(row, column)) : Two{};
          at[c][i][e] = two.at[0], at[c][i][e + 1] = column < row ? two.at[1] : 0;
        }
      }
    }
  }

  constexpr bool has(unsigned panel) const { return panel % kTileWarps == warp; }
  // The first panel, by the warp that has it.
  constexpr void publish(Matrix<kDim>& m) const { publish_column<0>(m); }
  // Takes a panel off the next one and publishes that, by the warp that has it. Two strips at a time: a product waits for
  // the one before it in the same tile.
  template <class Products>
  constexpr void update_next(Matrix<kDim>& m, unsigned panel, const Products& products) {
    const auto &l = m.l[panel % 2], &u = m.u[panel % 2];
    choose((panel + 1) / kTileWarps, [&]<unsigned kColumn>() {
      const auto right = products.right(u, kPanel * (panel + 1), lane);
#pragma unroll
      for (unsigned i = first_strip(kColumn); i < kStrips; i += 2) {
        const auto a = products.left(l, kTileRows * i, lane), b = products.left(l, kTileRows * (i + 1), lane);
        products.take_off(at[kColumn][i], at[kColumn][i + 1], a, b, right, lane);
      }
      publish_column<kColumn>(m);
    });
  }
  // Takes a panel off all that is behind the next one. (What of a warp's tiles is done changes, too: nobody reads it.)
  template <class Products>
  constexpr void update_rest(const Matrix<kDim>& m, unsigned panel, const Products& products) {
    const auto &l = m.l[panel % 2], &u = m.u[panel % 2];
    choose((panel + 2) / kTileWarps, [&]<unsigned kFirst>() {
#pragma unroll
      for (unsigned i = first_strip(kFirst); i < kStrips; i += 2) {
        const auto a = products.left(l, kTileRows * i, lane), b = products.left(l, kTileRows * (i + 1), lane);
#pragma unroll
        for (unsigned c = kFirst; c < kColumns && first_strip(c) <= i; ++c) {
          const auto right = products.right(u, kPanel * panel_of(c), lane);
          products.take_off(at[c][i], at[c][i + 1], a, b, right, lane);
        }
      }
    });
  }

 private:
  constexpr unsigned row_of(unsigned strip, unsigned element) const {
    return kTileRows * strip + lane / 4 + element / 2 * 8;
  }
  constexpr unsigned panel_of(unsigned column) const { return warp + kTileWarps * column; }

  // f of a column that is known while compiling: registers have no index.
  template <class F>
  static constexpr void choose(unsigned column, const F& f) {
    if (column == 0) f.template operator()<0>();
    if (column == 1) f.template operator()<1>();
    if constexpr (kColumns > 2) {
      if (column == 2) f.template operator()<2>();
      if (column == 3) f.template operator()<3>();
    }
    static_assert(kColumns == 2 || kColumns == 4);
  }

  // Rows before the panel's come out as they are; nobody reads them.
  template <unsigned kColumn>
  constexpr void publish_column(Matrix<kDim>& m) const {
    float* const to = m.columns + PanelRow::at(lane / 4, lane % 4 * 2);
#pragma unroll
    for (unsigned i = first_strip(kColumn); i < kStrips; ++i) {
      const auto& tile = at[kColumn][i];
      store_floats(to + kPanel * kTileRows * i, Two{tile[0], tile[1]});
      store_floats(to + kPanel * (kTileRows * i + 8), Two{tile[2], tile[3]});
    }
  }
};

// Threads of the whole elimination, and how many of them meet at its two barriers: a panel passes to the threads of the
// rows when it is published, and back to those of the tiles when it is eliminated.
template <int kDim>
struct Elimination {
  static constexpr int kPanels = kDim / kPanel, kTileThreads = 32 * kTileWarps;
  static constexpr int kTilesFrom = kSolveThreads - kTileThreads;
  static constexpr int kAtPublished = kDim + 32, kAtEliminated = kDim + kTileThreads;
  static_assert(kDim <= kTilesFrom);

  // A thread's part. `Barriers`: who waits, and who only says that it is there.
  template <class Barriers, class Inverse, class Products>
  static constexpr void run(Matrix<kDim>& m, int thread, const Barriers& barriers, const Inverse& inverse_of,
                            const Products& products) {
    if (thread < kDim) {
      RowElimination<kDim> row(m, thread);
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        row.publish(m, panel);
        barriers.wait_published(panel);
        row.eliminate(m, panel, inverse_of);
        if (panel + 1 < kPanels) barriers.eliminated(panel);
      }
    } else if (thread >= kTilesFrom) {
      Tiles<kDim> tiles(m, thread - kTilesFrom);
      if (tiles.has(0)) {
        tiles.publish(m);
        barriers.published(0);
      }
#pragma unroll 1
      for (int panel = 0; panel + 1 < kPanels; ++panel) {
        barriers.wait_eliminated(panel);
        if (tiles.has(panel + 1)) {
          tiles.update_next(m, panel, products);
          barriers.published(panel + 1);
        }
        tiles.update_rest(m, panel, products);
      }
    }
  }
};

}  // namespace lla::cuda::sm90::decode
