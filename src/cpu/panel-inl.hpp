// A panel of rows: which rows of the problem its lanes are, which keys they see, and their softmax weights.
#if defined(LLA_CPU_PANEL_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_PANEL_INL_HPP
#undef LLA_CPU_PANEL_INL_HPP
#else
#define LLA_CPU_PANEL_INL_HPP
#endif

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/centred-inl.hpp"
#include "cpu/memory.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

template <class T>
struct Panel : PanelMemory<T> {
  static constexpr int64_t kWidth = kPanel<T>;

  int64_t first_row;  // of the kv head's rows: row r is query r / group of head kv_head * group + r % group
  int64_t rows;       // lanes in use; the others repeat the last row's mask and hold zeros
  int64_t lane_begin[kWidth], lane_end[kWidth];  // keys a lane sees
  int64_t begin, end;                            // keys any lane sees
  int64_t all_begin, all_end;                    // keys every lane sees (empty if all_begin >= all_end)
  uint64_t pairs;                                // (query, visible key) pairs
  bool bad[kWidth];                              // the row is NaN
  int32_t status[kWidth], iterations[kWidth];
  HWY_ALIGN T relative_residual[kWidth];
  HWY_ALIGN T max[kWidth], omega[kWidth], omega_squares[kWidth];
  int64_t top[kWidth];                  // forward: the key of the largest logit, -1 without one
  HWY_ALIGN T top_weight[kWidth];       // and its weight
  HWY_ALIGN T variance[kWidth];         // of a channel of the keys, under the weights
  LaneCentres<T> centre;                // of the pass at hand
  HWY_ALIGN T row_sum[kWidth];          // of the pass's coefficients
  HWY_ALIGN T offset[kWidth];           // what the keys' shift takes off the logits, rounded up to an integer
  HWY_ALIGN T offset_rest[kWidth];      // ... and what that is too much, at most 0
  HWY_ALIGN T spread[kWidth];           // backward: mean square of G.v - tau
  double row_unit_squares[kWidth];      // what 1 is, squared, in the units the solver scaled the right-hand side to
  bool low_lanes[kWidth];               // rows whose solution has a low part
  int32_t rhs_exponent[kWidth];         // the solve: rhs is divided by 2^this; kNoExponent: it is zero
  const LaneCentres<T>* tau = nullptr;  // backward: centres of G.v, value being G

  bool empty(int64_t lane) const { return lane_begin[lane] == lane_end[lane]; }
  // A row that sees no key is 0 whatever else it holds.
  void mark_bad(int64_t lane) { bad[lane] = !empty(lane); }

  // What rounding took off the solution, null where no lane needs it.
  const T* low_part() const {
    return std::find(low_lanes, low_lanes + kWidth, true) < low_lanes + kWidth ? this->low : nullptr;
  }

  int64_t base() const { return begin / kPackRows * kPackRows; }
  // The part of a tile this panel walks over; starts at a pack, empty if lo >= hi.
  int64_t lo(int64_t tile) const { return std::max(tile * kTile, base()); }
  int64_t hi(int64_t tile) const { return std::min((tile + 1) * kTile, end); }
};

template <class T>
void clear(T* array, int64_t channels) {
  std::fill_n(array, channels * kPanel<T>, T{0});
}

// Sets the panel's rows and what each lane sees. Lanes beyond `rows` must be given a range too: the last row's.
template <class T>
void set_ranges(Panel<T>& panel, int64_t first_row, int64_t rows, const int64_t* begin, const int64_t* end) {
  panel.first_row = first_row;
  panel.rows = rows;
  panel.begin = panel.all_end = std::numeric_limits<int64_t>::max();
  panel.end = panel.all_begin = 0;
  panel.pairs = 0;
  for (int64_t l = 0; l < panel.kWidth; ++l) {
    panel.lane_begin[l] = begin[l];
    panel.lane_end[l] = end[l];
    panel.all_begin = std::max(panel.all_begin, begin[l]);
    panel.all_end = std::min(panel.all_end, end[l]);
    if (begin[l] < end[l]) {
      panel.begin = std::min(panel.begin, begin[l]);
      panel.end = std::max(panel.end, end[l]);
      if (l < rows) panel.pairs += static_cast<uint64_t>(end[l] - begin[l]);
    }
    panel.bad[l] = false;
    panel.status[l] = LLA_ROW_OK;
    panel.iterations[l] = 0;
    panel.relative_residual[l] = 0;
    panel.offset[l] = panel.offset_rest[l] = panel.spread[l] = 0;
    panel.row_unit_squares[l] = 1;
    panel.low_lanes[l] = false;
  }
  panel.begin = std::min(panel.begin, panel.end);
}

template <class T>
void set_rows(Panel<T>& panel, const core::Problem& p, const core::Sequence& s, int64_t first_row, int64_t rows) {
  int64_t begin[kPanel<T>], end[kPanel<T>];
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    const int64_t i = (first_row + std::min(l, rows - 1)) / p.group();
    const core::KeyRange keys = core::visible_keys(p.mask, s, i, i);
    begin[l] = keys.begin;
    end[l] = keys.end;
  }
  set_ranges(panel, first_row, rows, begin, end);
}

// Rows [lo, hi) of the logits (in log2 units: q holds scale * log2(e) * q), up to the end of hi's pack.
template <class T>
HWY_INLINE void logits_tile(const Panel<T>& panel, const T* keys_transposed, int64_t dim, int64_t lo, int64_t hi,
                            T* to) {
  transposed_product(keys_transposed, dim, lo, hi, panel.q, [to](int64_t j, Vec<T> s0, Vec<T> s1) HWY_ATTR {
    store(s0, to + j * kPanel<T>);
    store(s1, to + j * kPanel<T> + kLanes<T>);
  });
}

// For a tile some lane sees only in part: lane masks by comparing the key's place in the tile with the lane's range.
template <class T>
struct TileMask {
  bool needed;
  HWY_ALIGN T begin[kPanel<T>], end[kPanel<T>];

  TileMask(const Panel<T>& panel, int64_t lo, int64_t hi) : needed(lo < panel.all_begin || hi > panel.all_end) {
    if (!needed) return;
    for (int64_t l = 0; l < kPanel<T>; ++l) {
      begin[l] = static_cast<T>(std::clamp<int64_t>(panel.lane_begin[l] - lo, 0, kTile));
      end[l] = static_cast<T>(std::clamp<int64_t>(panel.lane_end[l] - lo, 0, kTile));
    }
  }
  HWY_INLINE auto lanes(int64_t j, int64_t at) const {
    const auto key = splat(static_cast<T>(j));
    return hn::And(hn::Ge(key, load(begin + at)), hn::Lt(key, load(end + at)));
  }
};

// panel.max = the largest visible logit of the tile and of those before, panel.top the key it belongs to.
template <class T>
void update_max(Panel<T>& panel, const T* logits, int64_t lo, int64_t hi) {
  const TileMask<T> mask(panel, lo, hi);
  HWY_ALIGN T found[kPanel<T>];
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    auto largest = load(panel.max + at), where = splat(T{-1});
    for (int64_t j = 0; j < hi - lo; ++j) {
      const auto s = load(logits + j * kPanel<T> + at);
      auto larger = hn::Gt(s, largest);
      if (mask.needed) larger = hn::And(larger, mask.lanes(j, at));
      largest = hn::IfThenElse(larger, s, largest);
      where = hn::IfThenElse(larger, splat(static_cast<T>(j)), where);
    }
    store(largest, panel.max + at);
    store(where, found + at);
  }
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (found[l] >= 0) panel.top[l] = lo + static_cast<int64_t>(found[l]);
  }
}

// Calls visit(lane, element of a tile of keys [lo, hi)) for each lane whose top key is among them.
template <class T, class Visit>
HWY_INLINE void for_top_keys(const Panel<T>& panel, int64_t lo, int64_t hi, const Visit& visit) {
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    if (panel.top[l] >= lo && panel.top[l] < hi) visit(l, (panel.top[l] - lo) * kPanel<T> + l);
  }
}

// Logits become weights, in place; what a lane does not see and the rest of the last pack become 0.
// With statistics (key_squares: |k|^2 of the head's keys) their sums, sums of squares and mean |k|^2 are added to the
// panel's.
template <bool kStatistics, class T>
void logits_to_weights(Panel<T>& panel, T* tile, int64_t lo, int64_t hi, const T* key_squares = nullptr) {
  const TileMask<T> mask(panel, lo, hi);
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    const auto max = load(panel.max + at);
    auto sum = hn::Zero(Tag<T>()), squares = hn::Zero(Tag<T>()), norms = hn::Zero(Tag<T>());
    for (int64_t j = 0; j < hi - lo; ++j) {
      T* const to = tile + j * kPanel<T> + at;
      auto w = exp2_lanes(hn::Sub(load(to), max));
      if (mask.needed) w = hn::IfThenElseZero(mask.lanes(j, at), w);
      store(w, to);
      if (kStatistics) {
        sum = hn::Add(sum, w);
        squares = hn::MulAdd(w, w, squares);
        norms = hn::MulAdd(w, splat(key_squares[lo + j]), norms);
      }
    }
    for (int64_t j = hi - lo; j < round_up(hi - lo, kPackRows); ++j)
      store(hn::Zero(Tag<T>()), tile + j * kPanel<T> + at);
    if (kStatistics) {
      store(hn::Add(load(panel.omega + at), sum), panel.omega + at);
      store(hn::Add(load(panel.omega_squares + at), squares), panel.omega_squares + at);
      store(hn::Add(load(panel.variance + at), norms), panel.variance + at);
    }
  }
}

template <class T>
void clear_statistics(Panel<T>& panel) {
  for (T* lanes : {panel.omega, panel.omega_squares, panel.variance}) std::fill_n(lanes, kPanel<T>, T{0});
}

// Once all weights are known: from the sum of w |k|^2 to the variance of a channel.
template <class T>
void finish_statistics(Panel<T>& panel, int64_t dim) {
  HWY_ALIGN T mean_squares[kPanel<T>];
  lane_dots(panel.mean_k, panel.mean_k, dim, mean_squares);
  for (int64_t l = 0; l < kPanel<T>; ++l) {
    const T squares = panel.omega[l] > 0 ? panel.variance[l] / panel.omega[l] - mean_squares[l] : T{0};
    panel.variance[l] = std::max(squares, T{0}) / static_cast<T>(dim);
  }
}

// Weights of keys [lo, hi): from the cache, or computed again into `tile`.
template <class T>
HWY_INLINE const T* weights_tile(Panel<T>& panel, const T* keys_transposed, int64_t dim, int64_t lo, int64_t hi,
                                 T* tile) {
  if (panel.weights) return panel.weights + (lo - panel.base()) * kPanel<T>;
  logits_tile(panel, keys_transposed, dim, lo, hi, tile);
  logits_to_weights<false>(panel, tile, lo, hi);
  return tile;
}

// array = (array - row_sum * mean) / omega, lane by lane; 0 where omega is 0. With kAddMean, plus the mean.
template <bool kAddMean, class T>
void centre_and_divide(const Panel<T>& panel, T* array, const T* mean, int64_t channels) {
  const Tag<T> d;
  for (int64_t at = 0; at < kPanel<T>; at += kLanes<T>) {
    const auto omega = load(panel.omega + at);
    const auto sum = load(panel.row_sum + at);
    const auto empty = hn::Eq(omega, hn::Zero(d));
    for (int64_t c = 0; c < channels; ++c) {
      T* const to = array + c * kPanel<T> + at;
      const auto m = load(mean + c * kPanel<T> + at);
      auto value = hn::Div(hn::NegMulAdd(sum, m, load(to)), omega);
      if (kAddMean) value = hn::Add(value, m);
      store(hn::IfThenZeroElse(empty, value), to);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
