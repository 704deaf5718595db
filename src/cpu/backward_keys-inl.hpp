// Backward, pass B, one block of keys: dk and dv. The roles are swapped: lanes are keys, what is broadcast are the rows
// that pass A packed, in the order of the head's rows, so the sum over a group's heads needs nothing of its own. 8
// products.
//
// A panel's arrays are KeyArrays; lane_begin and lane_end are the rows that see the key. Both sums are as if the
// gradients had been divided by 2^exponent, the largest of the rows' exponents, and dk's as if the values had been
// divided by theirs.
#if defined(LLA_CPU_BACKWARD_KEYS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_BACKWARD_KEYS_INL_HPP
#undef LLA_CPU_BACKWARD_KEYS_INL_HPP
#else
#define LLA_CPU_BACKWARD_KEYS_INL_HPP
#endif

#include "cpu/cg-inl.hpp"
#include "cpu/layout.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// The queries that see key j: [first, last).
inline std::pair<int64_t, int64_t> queries_of_key(const core::Mask& mask, const core::Sequence& s, int64_t j) {
  const int64_t diagonal = j - (s.length_k - s.length_q);
  const int64_t first = mask.right < 0 ? 0 : std::clamp<int64_t>(diagonal - mask.right, 0, s.length_q);
  const int64_t last = mask.left < 0 ? s.length_q : std::clamp<int64_t>(diagonal + mask.left + 1, 0, s.length_q);
  return {first, std::max(first, last)};
}

template <class T>
void set_keys(Panel<T>& panel, const core::Problem& p, const core::Sequence& s, int64_t first_key, int64_t keys) {
  int64_t begin[kPanel<T>], end[kPanel<T>];
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    const auto [first, last] = queries_of_key(p.mask, s, first_key + std::min(l, keys - 1));
    begin[l] = first * p.group();
    end[l] = last * p.group();
  }
  set_ranges(panel, first_key, keys, begin, end);
}

// Probabilities p = exp2(logit - max) / omega of the rows [lo, hi), in place. With each goes the row's power of two:
// everything summed is a probability times one thing linear in the row's gradient.
template <class T>
void logits_to_probabilities(const Panel<T>& panel, const PackedQueries<T>& rows, int32_t exponent, int64_t lo,
                             int64_t hi, T* tile) {
  const TileMask<T> mask(panel, lo, hi);
  for (int64_t j = 0; j < round_up(hi - lo, kPackRows); ++j) {
    const auto max = splat(rows.max[lo + j]),
               inverse = splat(PowerOfTwo<T>(rows.exponent[lo + j] - exponent)(rows.inverse_omega[lo + j]));
    for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
      T* const to = tile + j * kPanel<T> + at;
      auto probability = hn::Mul(exp2_lanes(hn::Sub(load(to), max)), inverse);
      if (mask.needed) probability = hn::IfThenElseZero(mask.lanes(j, at), probability);
      store(probability, to);
    }
  }
}

template <class T>
RowCentres<T> centres_from(const CentreRows<T>& rows, int64_t first) {
  return {rows.native + first, rows.precise + first, rows.wide + first};
}

// One tile of rows into dk and dv of one panel.
template <class T>
void add_rows(const core::Problem& p, Panel<T>& panel, const PackedQueries<T>& rows, int32_t exponent, int64_t lo,
              int64_t hi, T* const* tiles) {
  const int64_t dim = p.dim, value_dim = p.value_dim;
  const KeyArrays<T> own(panel);
  T *const ds = tiles[0], *const pa = tiles[1], *const pb = tiles[2];
  transposed_product(rows.q.transposed, dim, lo, hi, own.keys, [&](int64_t j, Vec<T> s0, Vec<T> s1) HWY_ATTR {
    store(s0, pa + j * kPanel<T>);
    store(s1, pa + j * kPanel<T> + kLanes<T>);
  });
  logits_to_probabilities(panel, rows, exponent, lo, hi, pa);
  T* const scratch = tiles[3];
  const auto put_b = [&](int64_t j, Vec<T> v0, Vec<T> v1) HWY_ATTR {
    store(v0, pb + j * kPanel<T>);
    store(v1, pb + j * kPanel<T> + kLanes<T>);
  };
  centred_product(rows.grad.transposed, value_dim, lo, hi, own.values, centres_from(rows.tau, lo), scratch, put_b);
  if (!p.given_x()) {
    const auto subtract_f = [&](int64_t j, Vec<T> f0, Vec<T> f1) HWY_ATTR {
      T* const to = pb + j * kPanel<T>;
      store(hn::Sub(load(to), f0), to);
      store(hn::Sub(load(to + kLanes<T>), f1), to + kLanes<T>);
    };
    centred_product(rows.y.transposed, dim, lo, hi, own.keys, centres_from(rows.centre_y, lo), scratch, subtract_f);
  }
  const auto finish_rows = [&](int64_t j, Vec<T> e0, Vec<T> e1) HWY_ATTR {
    const auto shift = splat(rows.shift_x[lo + j] - 1), shift_b = splat(rows.shift_b[lo + j]),
               c = splat(rows.c[lo + j]);
    const auto finish = [&](Vec<T> e, int64_t at) HWY_ATTR {
      const auto probability = load(pa + at), b = hn::Sub(load(pb + at), shift_b), a = hn::Sub(e, shift);
      store(hn::Mul(probability, hn::MulSub(a, b, c)), ds + at);
      store(hn::Mul(probability, a), pa + at);
      store(hn::Mul(probability, b), pb + at);
    };
    finish(e0, j * kPanel<T>);
    finish(e1, j * kPanel<T> + kLanes<T>);
  };
  centred_product(rows.x.transposed, dim, lo, hi, own.keys, centres_from(rows.centre_x, lo), scratch, finish_rows);
  natural_product(rows.grad.natural + lo * value_dim, value_dim, value_dim, pa, hi - lo, own.dv);
  natural_product(rows.q.natural + lo * dim, dim, dim, ds, hi - lo, own.dk);
  natural_product(rows.x.natural + lo * dim, dim, dim, pb, hi - lo, own.dk);
  if (!p.given_x()) natural_product(rows.y.natural + lo * dim, dim, dim, pa, hi - lo, own.dk);
}

template <class T>
void write_keys(const Panel<T>& panel, const core::BackwardCall& call, const PackedHead<T>& head,
                const PackedQueries<T>& queries, int32_t exponent) {
  const core::Problem& p = call.problem;
  const KeyArrays<T> own(panel);
  T row[kMaxChannels];
  for (int64_t l = 0; l < panel.rows; ++l) {
    const bool bad = queries.any_bad(panel.lane_begin[l], panel.lane_end[l]);
    const auto write = [&](const core::Operand& to, const T* array, int64_t channels, int32_t power) {
      if (!to) return;
      const PowerOfTwo<T> undo(power);
      for (int64_t c = 0; c < channels; ++c)
        row[c] = bad ? std::numeric_limits<T>::quiet_NaN() : undo(array[c * kPanel<T> + l]);
      write_row(to, row_offset(to, head.sequence.batch, head.sequence.start_k + panel.first_row + l, head.kv_head),
                channels, row);
    };
    write(call.dk, own.dk, p.dim, exponent + head.value_exponent());
    write(call.dv, own.dv, p.value_dim, exponent);
  }
}

template <class T>
void backward_keys(const core::BackwardCall& call, const PackedHead<T>& head, const PackedQueries<T>& queries,
                   int64_t first_key, int64_t keys, WorkerMemory<T>& memory) {
  const core::Problem& p = call.problem;
  PanelBlock<T> block(p, head, memory);
  int32_t exponent[kMaxPanels];
  for (int64_t j = first_key; j < first_key + keys; j += kPanel<T>) {
    Panel<T>& panel = block.panels[block.count];
    static_cast<PanelMemory<T>&>(panel) = memory.panels[block.count++];
    const KeyArrays<T> own(panel);
    set_keys(panel, p, head.sequence, j, std::min(kPanel<T>, first_key + keys - j));
    for (int64_t l = 0; l < kPanel<T>; ++l) {  // an unused lane repeats the last key
      const int64_t key = j + std::min(l, panel.rows - 1);
      for (int64_t c = 0; c < p.dim; ++c) own.keys[c * kPanel<T> + l] = head.k.natural[key * p.dim + c];
      for (int64_t c = 0; c < p.value_dim; ++c) own.values[c * kPanel<T> + l] = head.v.natural[key * p.value_dim + c];
    }
    int32_t& largest = exponent[block.count - 1];
    largest = kNoExponent;
    for (int64_t r = panel.begin; r < panel.end; ++r) largest = std::max(largest, queries.exponent[r]);
    if (largest == kNoExponent) largest = 0;
    clear(own.dk, p.dim);
    clear(own.dv, p.value_dim);
    block.count_products(panel, (p.given_x() ? 4 : 6) * p.dim + 2 * p.value_dim);
  }
  walk(block, nullptr, [&](int i, int64_t lo, int64_t hi) HWY_ATTR {
    add_rows(p, block.panels[i], queries, exponent[i], lo, hi, memory.tiles);
  });
  for (int i = 0; i < block.count; ++i) write_keys(block.panels[i], call, head, queries, exponent[i]);
  add_work(block.work);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
