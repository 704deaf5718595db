// The workspace: who gets which part of it. The same code measures (null base) and hands out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.hpp"
#include "cpu/pack.hpp"

namespace lla::cpu {

class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class U>
  U* take(int64_t count) {
    std::byte* at = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(U)), kAlignment);
    return reinterpret_cast<U*>(at);
  }
  size_t used() const { return static_cast<size_t>(used_); }

 private:
  static constexpr int64_t kAlignment = 128;
  std::byte* base_;
  int64_t used_ = 0;  // signed: the tests' sanitizer sees it overflow
};

constexpr int kMaxPanels = 4;  // panels that share one walk over the keys

// What decides the size of everything below; made from a problem by the planner (plan.cpp).
struct Shape {
  int64_t dim = 0, value_dim = 0;
  int64_t panel = 0;         // lanes of a panel in the problem's arithmetic
  int64_t direct_panel = 0;  // lanes of a panel of doubles
  int64_t panels = 0;        // panels a block
  int64_t weight_rows = 0;   // keys a panel's cached weights may span; 0: weights are recomputed
  bool direct = false;       // the direct solver may be needed
};

// Arrays of one panel of rows, [channel][lane]; see forward-inl.hpp and backward_rows-inl.hpp.
template <class T>
struct PanelMemory {
  T *q, *x, *direction, *image, *solution, *rhs, *residual, *mean_k, *ridge, *preconditioner;  // dim
  T* low;             // dim; what rounding took off the solution, where a row needs it (low_lanes of a Panel)
  T *mean_v, *value;  // value_dim
  T* weights;

  void take(Arena& arena, const Shape& s) {
    for (T** array : {&q, &x, &direction, &image, &solution, &rhs, &residual, &mean_k, &ridge, &preconditioner, &low}) {
      *array = arena.take<T>(s.dim * s.panel);
    }
    for (T** array : {&mean_v, &value}) *array = arena.take<T>(s.value_dim * s.panel);
    weights = s.weight_rows ? arena.take<T>(s.weight_rows * s.panel) : nullptr;
  }
};

// The same memory where the lanes are keys: the backward's pass over blocks of keys.
template <class T>
struct KeyArrays {
  T *const keys, *const dk;    // dim
  T *const values, *const dv;  // value_dim

  explicit KeyArrays(const PanelMemory<T>& of) : keys(of.q), dk(of.image), values(of.mean_v), dv(of.value) {}
};

// The direct solver works on panels of doubles whatever the problem's arithmetic.
struct DirectMemory {
  double* matrix = nullptr;    // upper triangle of the moments of (1, k - c), row by row, [entry][lane]
  double* keys = nullptr;      // a tile's (1, k - c)
  double* weights = nullptr;   // the tile's weights
  double* weighted = nullptr;  // ... times one channel
  double* gamma = nullptr;     // backward: moments of G.v with (1, k - c)
  double* diagonal = nullptr;  // of the matrix before it is factored
  double* solution = nullptr;
  double* centre = nullptr;

  static int64_t entries(int64_t dim) { return (dim + 1) * (dim + 2) / 2; }
  void take(Arena& arena, const Shape& s) {
    matrix = arena.take<double>(entries(s.dim) * s.direct_panel);
    keys = arena.take<double>(kTile * (s.dim + 1));
    weights = arena.take<double>(kTile * s.direct_panel);
    weighted = arena.take<double>(kTile * s.direct_panel);
    gamma = arena.take<double>((s.dim + 1) * s.direct_panel);
    diagonal = arena.take<double>((s.dim + 1) * s.direct_panel);
    solution = arena.take<double>((s.dim + 1) * s.direct_panel);
    centre = arena.take<double>(s.dim);
  }
};

// What one worker thread needs.
template <class T>
struct WorkerMemory {
  static constexpr int kTiles = 4;
  PanelMemory<T> panels[kMaxPanels];
  T* tiles[kTiles];  // [key of the tile][lane]
  DirectMemory direct;

  void take(Arena& arena, const Shape& s) {
    for (int64_t i = 0; i < s.panels; ++i) panels[i].take(arena, s);
    for (T*& tile : tiles) tile = arena.take<T>(kTile * s.panel);
    if (s.direct) direct.take(arena, s);
  }
};

template <class T>
void take_rows(Arena& arena, int64_t rows, int64_t channels, bool natural, bool transposed, PackedRows<T>& out) {
  const int64_t size = round_up(rows, kPackRows) * channels;
  out.natural = natural ? arena.take<T>(size) : nullptr;
  out.transposed = transposed ? arena.take<T>(size) : nullptr;
}

}  // namespace lla::cpu
