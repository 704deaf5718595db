// The whole workspace of a call. take() runs twice: once without memory, to measure, once to hand it out.
#pragma once

#include <new>

#include "cpu/memory.hpp"
#include "plan/implementation.hpp"

namespace lla::cpu {

// How a call is cut up. A pure function of problem and plan, so that measuring and running agree.
struct Schedule {
  Shape shape;
  int64_t packed_heads = 0;  // kv heads packed at a time
  int64_t heads = 0;         // kv heads of all sequences
  int64_t rows = 0;          // rows of the longest kv head: queries times group
  int64_t block_rows = 0;    // rows a block; in pass B of the backward, keys

  int64_t blocks(int64_t n) const { return (n + block_rows - 1) / block_rows; }
};

Schedule make_schedule(const core::Problem& p, const core::Plan& plan);

// What each row's products are centred by (centred-inl.hpp): in the problem's arithmetic, and in double where it
// counts.
template <class T>
struct CentreRows {
  T* native;
  T* precise;  // 1 where wide counts, else 0
  double* wide;
};

// The rows of the queries' side that pass B of the backward walks over, packed by pass A.
template <class T>
struct PackedQueries {
  PackedRows<T> q, x, y, grad;
  // One a row. E = (x.k - centre_x) - shift_x and b = (G.v - tau) - (y.k - centre_y) - shift_b, with shifts that make
  // the weighted sums of both vanish as computed: where one key has nearly all the weight, its own E and b are their
  // last digits. All that is linear in a row's gradient is as if that had been divided by 2^exponent, and all that is
  // linear in the values too as if those had been divided by a power of two of their own.
  T *max, *inverse_omega, *shift_x, *shift_b, *c;
  int32_t* exponent;
  CentreRows<T> tau, centre_x, centre_y;
  uint8_t* bad;
  std::atomic<int64_t>* bad_count;

  bool any_bad(int64_t begin, int64_t end) const { return any_flag(bad, bad_count, begin, end); }

  // Zero rows that fill up the last pack.
  void put_zeros(const core::Problem& p, int64_t first, int64_t last) const {
    for (int64_t r = first; r < last; ++r) {
      for (const PackedRows<T>* rows : {&q, &x, &y}) rows->put_zero(r, p.dim);
      grad.put_zero(r, p.value_dim);
      for (T* array : {max, inverse_omega, shift_x, shift_b, c}) array[r] = 0;
      exponent[r] = kNoExponent;
      for (const CentreRows<T>* centres : {&tau, &centre_x, &centre_y}) {
        centres->native[r] = centres->precise[r] = 0;
        centres->wide[r] = 0;
      }
    }
  }

  void take(Arena& arena, const core::Problem& p, int64_t rows) {
    const int64_t padded = round_up(rows, kPackRows);
    const bool solves = !p.given_x();
    take_rows(arena, rows, p.dim, true, true, q);
    take_rows(arena, rows, p.dim, true, true, x);
    take_rows(arena, rows, p.dim, solves, solves, y);
    take_rows(arena, rows, p.value_dim, true, true, grad);
    for (T** array : {&max, &inverse_omega, &shift_x, &shift_b, &c}) *array = arena.take<T>(padded);
    for (CentreRows<T>* centres : {&tau, &centre_x, &centre_y}) {
      centres->native = arena.take<T>(padded);
      centres->precise = arena.take<T>(padded);
      centres->wide = arena.take<double>(padded);
    }
    exponent = arena.take<int32_t>(padded);
    bad = arena.take<uint8_t>(padded);
    bad_count = arena.take<std::atomic<int64_t>>(1);
  }
};

template <class T>
struct Layout {
  PackedHead<T>* heads;       // one a packed head
  PackedQueries<T>* queries;  // one a packed head; backward only
  WorkerMemory<T>* workers;
  double* ridge_rows;  // backward, ridge shared between rows: each row's share of its gradient

  size_t take(void* base, const core::Problem& p, const core::Plan& plan, const Schedule& s) {
    Arena arena(base);
    const bool backward = p.operation == core::Operation::backward;
    heads = arena.take<PackedHead<T>>(s.packed_heads);
    queries = backward ? arena.take<PackedQueries<T>>(s.packed_heads) : nullptr;
    workers = arena.take<WorkerMemory<T>>(plan.workers);
    const bool shared_ridge = p.ridge == core::RidgeShape::scalar || p.ridge == core::RidgeShape::head;
    ridge_rows = backward && shared_ridge ? arena.take<double>(p.rows()) : nullptr;
    for (int64_t i = 0; i < s.packed_heads; ++i) {
      PackedHead<T> head{};
      take_rows(arena, p.seqlen_k, p.dim, true, true, head.k);
      take_rows(arena, p.seqlen_k, p.value_dim, true, backward, head.v);
      head.bad = arena.take<uint8_t>(round_up(p.seqlen_k, kPackRows));
      head.bad_count = arena.take<std::atomic<int64_t>>(1);
      head.key_squares = arena.take<T>(round_up(p.seqlen_k, kPackRows));
      head.shift = arena.take<T>(p.dim);
      for (T** array : {&head.value_size, &head.value_spread}) {
        *array = backward ? arena.take<T>((p.seqlen_k + kTile - 1) / kTile) : nullptr;
      }
      if (base) new (heads + i) PackedHead<T>(head);
      if (backward) {
        PackedQueries<T> rows{};
        rows.take(arena, p, s.rows);
        if (base) new (queries + i) PackedQueries<T>(rows);
      }
    }
    for (int i = 0; i < plan.workers; ++i) {
      WorkerMemory<T> worker{};
      worker.take(arena, s.shape);
      if (base) new (workers + i) WorkerMemory<T>(worker);
    }
    return arena.used();
  }
};

}  // namespace lla::cpu
