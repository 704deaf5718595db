// Decoding: sums over a span of keys for the few rows of a unit, their merge, and the solve.
//
// With r = 2^(logit / 2 - max) and c near the keys' mean the matrix of a row is the sum of (r (k - c)) (r (k - c))^T:
// one symmetric product over a tile whose rows were scaled. Its solution is tried on the keys themselves: one more pass
// forms w ((k - mean) . x), from whose sums over keys and over values follow the residual and the output. Where the
// residual is too large it is solved for in turn.
#if defined(LLA_CPU_DECODE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_DECODE_INL_HPP
#undef LLA_CPU_DECODE_INL_HPP
#else
#define LLA_CPU_DECODE_INL_HPP
#endif

#include <cmath>
#include <limits>

#include "cpu/decode_tile-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

template <class T>
TileSource tile_at(const DecodeUnit<T>& unit, int64_t first, int64_t span) {
  const int64_t last = std::min(unit.base + (span + 1) * unit.span_keys, unit.end);
  return {*unit.call, unit.sequence, unit.kv_head, first, std::min(kDecodeTile, last - first), unit.end};
}

template <class T>
void mark_bad(DecodeUnit<T>& unit, int64_t span, const TileSource& tile, const uint8_t* bad) {
  unit.sums[span * kDecodeRows].bad_keys = true;
  for (int64_t i = 0; i < unit.rows; ++i) {
    for (int64_t j = 0; j < tile.count; ++j) {
      const int64_t key = tile.first + j;
      if (bad[j] && key >= unit.row[i].begin && key < unit.row[i].end) unit.sums[span * kDecodeRows + i].bad = true;
    }
  }
}

template <class T>
void add_to(double* to, const T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += static_cast<double>(from[i]);
}

// 4^(from - to), exactly; 0 where there was nothing.
inline double rescale(double from, double to) {
  return std::isfinite(from) ? std::ldexp(1.0, static_cast<int>(std::max(2 * (from - to), -4000.0))) : 0.0;
}

// A larger maximum: what was summed so far changes its unit.
template <class T>
void raise_max(SpanSums& sums, double max, const DecodeSizes& size, bool has_matrix, T* triangle) {
  const double factor = rescale(sums.max, max);
  const bool first = std::isinf(sums.max);
  sums.max = max;
  if (first) return;  // everything is 0 yet
  sums.omega *= factor;
  sums.omega_squares *= factor * factor;
  sums.coefficients *= factor;
  const auto scale = [&](auto* array, int64_t count) {
    using Element = std::remove_reference_t<decltype(*array)>;
    for (int64_t i = 0; i < count; ++i) array[i] *= static_cast<Element>(factor);
  };
  if (triangle) {
    scale(sums.keys, size.key_stride);
    if (has_matrix) scale(sums.matrix, size.entries);
    scale(triangle, size.entries);
  } else {
    scale(sums.values, size.value_stride);
    scale(sums.steered, size.value_stride);
  }
}

template <class T>
constexpr T kUnseen = std::numeric_limits<T>::lowest() / 4;

// What a row's logits on a tile become: dots beyond the row's keys are pushed out of sight, the largest is returned.
template <class T>
T mask_dots(const DecodeRow<T>& row, const TileSource& tile, T* dots) {
  const int64_t begin = std::clamp<int64_t>(row.begin - tile.first, 0, tile.count);
  const int64_t end = std::clamp<int64_t>(row.end - tile.first, begin, tile.count);
  std::fill_n(dots, begin, kUnseen<T>);
  std::fill_n(dots + end, kDecodeTile - end, kUnseen<T>);
  auto largest = splat(kUnseen<T>);
  for (int64_t j = 0; j < kDecodeTile; j += kLanes<T>) largest = hn::Max(largest, load(dots + j));
  return begin < end ? hn::GetLane(hn::MaxOfLanes(Tag<T>(), largest)) : kUnseen<T>;
}

// roots[j] = sqrt(w_j) = 2^(dots[j] - max); their squares and fourth powers are added up.
template <class T>
void find_roots(const T* dots, double max, T* roots, SpanSums& sums) {
  const auto shift = splat(static_cast<T>(max));
  auto omega = hn::Zero(Tag<T>()), squares = omega;
  for (int64_t j = 0; j < kDecodeTile; j += kLanes<T>) {
    const auto root = exp2_lanes(hn::Sub(load(dots + j), shift));
    const auto w = hn::Mul(root, root);
    store(root, roots + j);
    omega = hn::Add(omega, w);
    squares = hn::MulAdd(w, w, squares);
  }
  sums.omega += static_cast<double>(hn::GetLane(hn::SumOfLanes(Tag<T>(), omega)));
  sums.omega_squares += static_cast<double>(hn::GetLane(hn::SumOfLanes(Tag<T>(), squares)));
}

// scaled[j] = roots[j] keys[j], and sum += roots[j] scaled[j].
template <int N, class T>
HWY_INLINE void scale_columns(const T* keys, const T* roots, int64_t from, int64_t stride, int64_t count, T* scaled,
                              T* sum) {
  for (; from + N * kLanes<T> <= stride; from += N * kLanes<T>) {
    Vec<T> sums[N];
    for (auto& s : sums) s = hn::Zero(Tag<T>());
    for (int64_t j = 0; j < count; ++j) {
      const auto root = splat(roots[j]);
      const int64_t at = j * stride + from;
      for (int n = 0; n < N; ++n) {
        const auto value = hn::Mul(root, load(keys + at + n * kLanes<T>));
        store(value, scaled + at + n * kLanes<T>);
        sums[n] = hn::MulAdd(root, value, sums[n]);
      }
    }
    for (int n = 0; n < N; ++n) store(sums[n], sum + from + n * kLanes<T>);
  }
  if constexpr (N > 1) scale_columns<N / 2>(keys, roots, from, stride, count, scaled, sum);
}

template <class T>
void clear_sums(SpanSums& sums, const DecodeSizes& size, bool matrix) {
  sums.max = -std::numeric_limits<double>::infinity();
  sums.omega = sums.omega_squares = sums.coefficients = 0;
  sums.bad = sums.bad_keys = false;
  if (matrix) {
    std::fill_n(sums.keys, size.key_stride, 0.0);
  } else {
    std::fill_n(sums.values, size.value_stride, 0.0);
    std::fill_n(sums.steered, size.value_stride, 0.0);
  }
}

// One row's weights on a tile, its keys scaled by their roots and added to its matrix.
template <class T>
void add_matrix_tile(DecodeUnit<T>& unit, int64_t span, int64_t i, const TileSource& tile, const DecodeSizes& size,
                     const DecodeWorker<T>& worker, bool has_matrix, const TileRows& soon) {
  DecodeRow<T>& row = unit.row[i];
  SpanSums& sums = unit.sums[span * kDecodeRows + i];
  T* const dots = worker.dots + i * kDecodeTile;
  T* const triangle = worker.triangle + i * size.entries;
  const T largest = mask_dots(row, tile, dots);
  std::copy_n(dots, kDecodeTile, row.logits + (tile.first - unit.base));
  if (largest == kUnseen<T>) return;
  if (!(static_cast<double>(largest) <= sums.max)) {
    raise_max(sums, std::ceil(static_cast<double>(largest)), size, has_matrix, triangle);
  }
  constexpr double kVanishing = std::numeric_limits<T>::min_exponent - 1;  // exp2_lanes gives 0 below
  if (static_cast<double>(largest) - sums.max < kVanishing) return;
  find_roots(dots, sums.max, worker.coefficients, sums);
  // The last row scales the tile itself: less to keep near.
  T* const scaled = i + 1 == unit.rows ? worker.keys : worker.scaled;
  HWY_ALIGN T mean[kMaxChannels];
  scale_columns<8>(worker.keys, worker.coefficients, 0, size.key_stride, tile.count, scaled, mean);
  add_to(sums.keys, mean, size.key_stride);
  add_triangle(scaled, unit.call->problem.dim, size.key_stride, tile.count, triangle, soon);
}

template <class T>
void statistics_of_span(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker) {
  const core::Problem& p = unit.call->problem;
  const DecodeSizes size = sizes_of<T>(p.dim, p.value_dim);
  const T* queries[kDecodeRows];
  for (int64_t i = 0; i < unit.rows; ++i) {
    queries[i] = unit.row[i].query;
    clear_sums<T>(unit.sums[span * kDecodeRows + i], size, true);
  }
  const T* const shift = unit.shifted ? unit.shift : nullptr;
  TilePair keys(unit.call->k, p.dim);
  KeyReader<T> reader(p, size.key_stride, shift, queries, unit.rows, worker);
  const int64_t first = unit.base + span * unit.span_keys, last = std::min(first + unit.span_keys, unit.end);
  for (int64_t sum = first; sum < last; sum += kDecodeSum) {
    std::fill_n(worker.triangle, unit.rows * size.entries, T{0});
    for (int64_t at = sum; at < std::min(sum + kDecodeSum, last); at += kDecodeTile) {
      const TileSource tile = tile_at(unit, at, span);
      keys.move_to(tile);
      uint8_t bad[kDecodeTile] = {};
      reader.template read<true, true>(tile, keys.now(), TileRows(), bad);
      if (reader.any_bad()) mark_bad(unit, span, tile, bad);
      for (int64_t i = 0; i < unit.rows; ++i) {
        if (unit.row[i].state != DecodeState::solving) continue;
        add_matrix_tile(unit, span, i, tile, size, worker, sum > first, keys.soon());
      }
    }
    for (int64_t i = 0; i < unit.rows; ++i) {
      double* const to = unit.sums[span * kDecodeRows + i].matrix;
      const T* const from = worker.triangle + i * size.entries;
      if (sum == first) {
        std::copy_n(from, size.entries, to);
      } else {
        add_to(to, from, size.entries);
      }
    }
  }
}

// Adds a tile's values to the sums of the rows named by `which`, whose coefficients are in place, and marks rows that
// see a bad key or value.
template <class T>
void add_values(DecodeUnit<T>& unit, int64_t span, const TileSource& tile, const TileRows& values, const TileRows& soon,
                const DecodeSizes& size, const DecodeWorker<T>& worker, const int64_t* which, int64_t rows,
                uint8_t* bad, bool bad_keys) {
  HWY_ALIGN T sums[2 * kDecodeRows * kMaxChannels];
  const bool bad_values = sum_values(tile, values, soon, unit.call->problem, size.value_stride, 2 * rows,
                                     worker.coefficients, worker.values, sums, bad);
  if (bad_keys || bad_values) mark_bad(unit, span, tile, bad);
  for (int64_t n = 0; n < rows; ++n) {
    SpanSums& to = unit.sums[span * kDecodeRows + which[n]];
    add_to(to.values, sums + 2 * n * size.value_stride, size.value_stride);
    add_to(to.steered, sums + (2 * n + 1) * size.value_stride, size.value_stride);
  }
}

// A pass over a span's keys and values: of each tile the keys' products with the vectors, then what
// `coefficients(tile, its keys)` makes of them for the rows named by `which`, then the sums of the values. Without
// `check` no key is bad.
template <class T, class Coefficients>
HWY_INLINE void pass_over_span(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker,
                               const DecodeSizes& size, const T* const* vectors, int64_t vector_count, bool check,
                               const int64_t* which, int64_t rows, const Coefficients& coefficients) {
  const core::Problem& p = unit.call->problem;
  const T* const shift = unit.shifted ? unit.shift : nullptr;
  TilePair keys(unit.call->k, p.dim);
  KeyReader<T> reader(p, size.key_stride, shift, vectors, vector_count, worker);
  const int64_t first = unit.base + span * unit.span_keys, last = std::min(first + unit.span_keys, unit.end);
  for (int64_t at = first; at < last; at += kDecodeTile) {
    const TileSource tile = tile_at(unit, at, span);
    uint8_t bad[kDecodeTile] = {};
    keys.move_to(tile);
    TileRows values;  // on their way while their keys are read, and the next keys while they are
    values.find(tile, unit.call->v, p.value_dim);
    coefficients(tile, check ? reader.template read<true, false>(tile, keys.now(), values, bad)
                             : reader.template read<false, false>(tile, keys.now(), values, bad));
    add_values(unit, span, tile, values, keys.soon(), size, worker, which, rows, bad, reader.any_bad());
  }
}

// With x given: everything from one pass over keys and values.
template <class T>
void steered_sums_of_span(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker) {
  const core::Problem& p = unit.call->problem;
  const DecodeSizes size = sizes_of<T>(p.dim, p.value_dim);
  const T* vectors[2 * kDecodeRows];
  int64_t which[kDecodeRows];
  const int64_t rows = unit.rows;
  for (int64_t i = 0; i < rows; ++i) {
    which[i] = i;
    vectors[i] = unit.row[i].query;
    vectors[rows + i] = unit.row[i].vector;
    clear_sums<T>(unit.sums[span * kDecodeRows + i], size, false);
  }
  const auto coefficients = [&](const TileSource& tile, const Readable<T>&) HWY_ATTR {
    for (int64_t i = 0; i < rows; ++i) {
      SpanSums& sums = unit.sums[span * kDecodeRows + i];
      T* const dots = worker.dots + i * kDecodeTile;
      const T* const e = worker.dots + (rows + i) * kDecodeTile;
      const T largest = mask_dots(unit.row[i], tile, dots);
      if (largest != kUnseen<T> && !(static_cast<double>(largest) <= sums.max)) {
        raise_max<T>(sums, std::ceil(static_cast<double>(largest)), size, false, nullptr);
      }
      HWY_ALIGN T roots[kDecodeTile];
      find_roots(dots, std::isfinite(sums.max) ? sums.max : 0.0, roots, sums);
      T total = 0;
      T* const w = worker.coefficients + 2 * i * kDecodeTile;
      for (int64_t j = 0; j < tile.count; ++j) {
        w[j] = roots[j] * roots[j];
        w[kDecodeTile + j] = w[j] * e[j];
        total += w[kDecodeTile + j];
      }
      sums.coefficients += static_cast<double>(total);
    }
  };
  pass_over_span(unit, span, worker, size, vectors, 2 * rows, true, which, rows, coefficients);
}

// Tries each solving row's x on a span: sums of w E (k - c), w v and w E v. A row in double is not tried but believed:
// it leaves out the first.
template <class T>
void apply_to_span(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker) {
  constexpr bool kImage = sizeof(T) == 4;
  const core::Problem& p = unit.call->problem;
  const DecodeSizes size = sizes_of<T>(p.dim, p.value_dim);
  const T* vectors[kDecodeRows];
  int64_t which[kDecodeRows], rows = 0;
  for (int64_t i = 0; i < unit.rows; ++i) {
    if (unit.row[i].state != DecodeState::solving) continue;
    SpanSums& sums = unit.sums[span * kDecodeRows + i];
    sums.coefficients = 0;
    std::fill_n(sums.image, size.key_stride, 0.0);
    std::fill_n(sums.values, size.value_stride, 0.0);
    std::fill_n(sums.steered, size.value_stride, 0.0);
    which[rows] = i;
    vectors[rows++] = unit.row[i].vector;
  }
  if (rows == 0) return;
  const auto coefficients = [&](const TileSource& tile, const Readable<T>& keys) HWY_ATTR {
    for (int64_t n = 0; n < rows; ++n) {
      const DecodeRow<T>& row = unit.row[which[n]];
      SpanSums& sums = unit.sums[span * kDecodeRows + which[n]];
      const T* const logits = row.logits + (tile.first - unit.base);
      const T* const e = worker.dots + n * kDecodeTile;
      T *const w = worker.coefficients + 2 * n * kDecodeTile, *const u = w + kDecodeTile;
      const auto max = splat(static_cast<T>(row.max)), centre = splat(static_cast<T>(row.centre));
      auto total = hn::Zero(Tag<T>());
      for (int64_t j = 0; j < kDecodeTile; j += kLanes<T>) {
        const auto root = exp2_lanes(hn::Sub(load(logits + j), max));
        const auto weight = hn::Mul(root, root);
        // Behind the tile's last key the products are whatever the tile before left: not a number even.
        const auto product =
            hn::IfThenZeroElse(hn::Eq(weight, hn::Zero(Tag<T>())), hn::Mul(weight, hn::Sub(load(e + j), centre)));
        store(weight, w + j);
        store(product, u + j);
        total = hn::Add(total, product);
      }
      sums.coefficients += static_cast<double>(hn::GetLane(hn::SumOfLanes(Tag<T>(), total)));
      if constexpr (kImage) {
        HWY_ALIGN T image[kMaxChannels];
        sum_rows(keys, TileRows(), size.key_stride, 1, u, image);
        add_to(sums.image, image, size.key_stride);
      }
    }
  };
  const bool bad_keys = unit.sums[span * kDecodeRows].bad_keys;  // the statistics have marked them
  pass_over_span(unit, span, worker, size, vectors, rows, bad_keys, which, rows, coefficients);
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
