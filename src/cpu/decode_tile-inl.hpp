// What decoding does with one tile of keys or values, [key][channel] with channels filled up by zeros: reading it,
// products of its rows with a few vectors, and sums over its rows.
#if defined(LLA_CPU_DECODE_TILE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_DECODE_TILE_INL_HPP
#undef LLA_CPU_DECODE_TILE_INL_HPP
#else
#define LLA_CPU_DECODE_TILE_INL_HPP
#endif

#include <algorithm>

#include "cpu/decode.hpp"
#include "cpu/gemm-inl.hpp"
#include "cpu/keys.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// A vector of T from stored elements.
template <class T, class Stored>
HWY_INLINE auto load_16(hn::Rebind<float, Tag<T>> df, const Stored* p) {
  const hn::Rebind<uint16_t, Tag<T>> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
  if constexpr (std::is_same_v<Stored, core::bf16>) {
    const hn::RebindToUnsigned<decltype(df)> d32;
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
  } else {
    const hn::Rebind<hwy::float16_t, Tag<T>> dh;
    return hn::PromoteTo(df, hn::BitCast(dh, bits));
  }
}
template <class T, class Stored>
HWY_INLINE Vec<T> load_stored(const Stored* p) {
  const hn::Rebind<float, Tag<T>> df;
  if constexpr (std::is_same_v<Stored, T>) {
    return load(p);
  } else if constexpr (std::is_same_v<Stored, double>) {  // never asked for: f64 is summed in double
    return hn::Zero(Tag<T>());
  } else if constexpr (std::is_same_v<Stored, float>) {
    return hn::PromoteTo(Tag<T>(), hn::LoadU(df, p));
  } else if constexpr (sizeof(T) == 8) {
    return hn::PromoteTo(Tag<T>(), load_16<T>(df, p));
  } else {
    return load_16<T>(df, p);
  }
}

// Where the rows of a tile come from: keys [first, first + count) of one head, of which no row sees any from `end` on.
struct TileSource {
  const core::ForwardCall& call;
  const core::Sequence& sequence;
  int64_t kv_head, first, count, end;

  KeyCursor cursor(const core::Operand& t) const { return {call.cache, t, sequence, kv_head, first, end}; }
  // The tile behind it: empty where nobody sees any of it.
  TileSource next() const {
    const int64_t at = first + count;
    return {call, sequence, kv_head, at, std::clamp<int64_t>(end - at, 0, kDecodeTile), end};
  }
};

// Where the rows of a tile begin; up to a multiple of 4 the last one is repeated.
struct TileRows {
  const char* row[kDecodeTile];
  int64_t count = 0, lines = 0;  // lines: cache lines of a row worth asking for

  void find(const TileSource& from, const core::Operand& t, int64_t channels) {
    const int64_t width = t.dtype == DType::f64 ? 8 : t.dtype == DType::f32 ? 4 : 2;
    count = from.count;
    lines = t.stride[3] == 1 ? (channels * width + 63) / 64 : 1;
    if (count == 0) return;
    KeyCursor at = from.cursor(t);
    const char* const data = static_cast<const char*>(t.data);
    if (from.call.cache.page_size == 0) {
      for (int64_t j = 0; j < count; ++j) row[j] = data + (at.offset() + j * t.stride[1]) * width;
    } else {
      for (int64_t j = 0; j < count; ++j, at.next()) row[j] = data + at.offset() * width;
    }
    repeat_last();
  }
  template <class T>
  void point_to(const T* tile, int64_t stride, int64_t rows) {
    count = rows;
    for (int64_t j = 0; j < count; ++j) row[j] = reinterpret_cast<const char*>(tile + j * stride);
    repeat_last();
  }
  // Asks for four rows that will be read soon, every line of them: the hardware foresees less than that, even of rows
  // one behind the other. All of a tile at once would wait for each other.
  HWY_INLINE void fetch(int64_t j) const {
    if (j >= count) return;
    for (int64_t line = 0; line < lines; ++line) {
      for (int64_t m = 0; m < 4; ++m) __builtin_prefetch(row[j + m] + 64 * line, 0, 3);
    }
  }

 private:
  void repeat_last() {
    for (int64_t j = count; j < round_up(count, 4); ++j) row[j] = row[count - 1];
  }
};

// The rows of the tile at hand and of the one behind it.
class TilePair {
 public:
  TilePair(const core::Operand& t, int64_t channels) : t_(t), channels_(channels) {}
  void move_to(const TileSource& tile) {
    now_ ^= 1;
    if (!started_) rows_[now_].find(tile, t_, channels_);
    started_ = true;
    rows_[now_].count = tile.count;  // the last tile of a span ends before the keys do
    rows_[now_ ^ 1].find(tile.next(), t_, channels_);
  }
  const TileRows& now() const { return rows_[now_]; }
  const TileRows& soon() const { return rows_[now_ ^ 1]; }

 private:
  const core::Operand& t_;
  int64_t channels_;
  TileRows rows_[2];
  int now_ = 0;
  bool started_ = false;
};

// Rows that can be read a vector of T at a time: as they are stored, `shift` (or null) still to be subtracted, or a
// copy.
template <class T>
struct Readable {
  const TileRows* rows;
  DType dtype;
  const T* shift;

  Readable(const TileRows& stored, const core::Operand& t, const T* less)
      : rows(&stored), dtype(t.dtype), shift(less) {}
  explicit Readable(const TileRows& copied)
      : rows(&copied), dtype(sizeof(T) == 8 ? DType::f64 : DType::f32), shift(nullptr) {}
};
template <class T>
bool has_vectors(const core::Operand& t, int64_t channels, int64_t stride) {
  return t.stride[3] == 1 && channels == stride && (sizeof(T) == 8 || t.dtype != DType::f64);
}

// Calls visit(Stored(), whether there is a shift), both as types.
template <class T, class Visit>
HWY_INLINE void visit_stored(const Readable<T>& from, const Visit& visit) {
  const auto with_shift = [&](auto stored) HWY_ATTR {
    from.shift ? visit(stored, std::true_type()) : visit(stored, std::false_type());
  };
  switch (from.dtype) {
    case DType::bf16: return with_shift(core::bf16());
    case DType::f16: return with_shift(core::f16());
    case DType::f32: return with_shift(float());
    default:
      if constexpr (sizeof(T) == 8) with_shift(double());
  }
}

// Reads a tile an element at a time, less the shift where there is one; the channels behind the last and the rows up to
// a multiple of 4 are zero. A row that reaches `limit` is zero too and marked in `bad`; returns whether there is one.
template <class T>
HWY_NOINLINE bool load_any_tile(const TileSource& from, const core::Operand& t, int64_t channels, int64_t stride,
                                const T* shift, Bits<T> limit, T* to, uint8_t* bad) {
  bool any = false;
  KeyCursor at = from.cursor(t);
  std::fill_n(to, round_up(from.count, 4) * stride, T{0});
  for (int64_t j = 0; j < from.count; ++j, at.next()) {
    T* const row = to + j * stride;
    if (read_row(t, at.offset(), channels, row) >= limit) {
      std::fill_n(row, channels, T{0});
      bad[j] = 1;
      any = true;
    } else if (shift) {
      for (int64_t c = 0; c < channels; ++c) row[c] -= shift[c];
    }
  }
  return any;
}

// to[0 ... 3] = the sums of the four vectors' lanes.
template <class T>
HWY_INLINE void sum_each(const Vec<T>* v, T* to) {
  for (int i = 0; i < 4; ++i) to[i] = hn::GetLane(hn::SumOfLanes(Tag<T>(), v[i]));
}
HWY_INLINE void sum_four(const Vec<double>* v, double* to) { sum_each(v, to); }
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void sum_four(const Vec<float>* v, float* to) { sum_each(v, to); }
#else
HWY_INLINE void sum_four(const Vec<float>* v, float* to) {
  const Tag<float> d;
  const hn::Repartition<double, Tag<float>> dd;
  const auto pairs = [&](Vec<float> a, Vec<float> b)
                         HWY_ATTR { return hn::Add(hn::OddEven(b, a), hn::Reverse2(d, hn::OddEven(a, b))); };
  const auto ab = hn::BitCast(dd, pairs(v[0], v[1])), cd = hn::BitCast(dd, pairs(v[2], v[3]));
  const auto low = hn::BitCast(d, hn::OddEven(cd, ab));
  const auto high = hn::BitCast(d, hn::Reverse2(dd, hn::OddEven(ab, cd)));
  HWY_ALIGN float parts[kLanes<float>];
  store(hn::Add(low, high), parts);
  const hn::CappedTag<float, 4> d4;
  auto sum = hn::LoadU(d4, parts);
  for (int64_t at = 4; at < kLanes<float>; at += 4) sum = hn::Add(sum, hn::LoadU(d4, parts + at));
  hn::StoreU(sum, d4, to);
}
#endif

// dots[i][j] = row j . vectors[i], rows [0, count) and on to a multiple of 4; dots are kDecodeTile apart. With kKeep
// the rows are kept in `tile` on the way. `soon`: rows that come next. Returns the bits of the largest magnitude as
// stored, where asked for.
template <int kCount, bool kCheck, bool kKeep, bool kShift, class Stored, class T>
HWY_NOINLINE Bits<T> row_dots(const TileRows& from, const TileRows& soon, int64_t stride, const T* shift,
                              const T* const* vectors, T* tile, T* dots) {
  const hn::RebindToSigned<Tag<T>> di;
  auto largest = hn::Zero(di);
  const T* u[kCount];
  for (int i = 0; i < kCount; ++i) u[i] = vectors[i];
  for (int64_t j = 0; j < from.count; j += 4) {
    soon.fetch(j);
    const Stored* row[4];
    for (int m = 0; m < 4; ++m) row[m] = reinterpret_cast<const Stored*>(from.row[j + m]);
    T* const to = tile + j * stride;
    Vec<T> sums[kCount][4];
    for (auto& of_vector : sums) {
      for (auto& sum : of_vector) sum = hn::Zero(Tag<T>());
    }
    for (int64_t c = 0; c < stride; c += kLanes<T>) {
      for (int m = 0; m < 4; ++m) {
        auto k = load_stored<T>(row[m] + c);
        if (kCheck) largest = hn::Max(largest, hn::BitCast(di, hn::Abs(k)));
        if (kShift) k = hn::Sub(k, load(shift + c));
        if (kKeep) store(k, to + m * stride + c);
        for (int i = 0; i < kCount; ++i) sums[i][m] = hn::MulAdd(k, load(u[i] + c), sums[i][m]);
      }
    }
    for (int i = 0; i < kCount; ++i) sum_four(sums[i], dots + i * kDecodeTile + j);
  }
  return kCheck ? static_cast<Bits<T>>(hn::GetLane(hn::MaxOfLanes(di, largest))) : Bits<T>{0};
}
template <bool kCheck, bool kKeep, class T>
Bits<T> row_dots(const Readable<T>& from, const TileRows& soon, int64_t stride, const T* const* vectors,
                 int64_t vector_count, T* tile, T* dots) {
  Bits<T> largest = 0;
  visit_stored(from, [&](auto stored, auto kShift) HWY_ATTR {
    const auto count = [&](auto kCount) HWY_ATTR {
      largest = row_dots<kCount(), kCheck, kKeep, kShift(), decltype(stored)>(*from.rows, soon, stride, from.shift,
                                                                              vectors, tile, dots);
    };
    switch (std::min<int64_t>(vector_count, 4)) {
      case 1: return count(std::integral_constant<int, 1>());
      case 2: return count(std::integral_constant<int, 2>());
      case 3: return count(std::integral_constant<int, 3>());
      default: return count(std::integral_constant<int, 4>());
    }
  });
  if (vector_count > 4) {
    row_dots<false, false>(from, TileRows(), stride, vectors + 4, vector_count - 4, tile, dots + 4 * kDecodeTile);
  }
  return largest;
}

// Reads the tiles of one pass over keys, and their products with a few vectors into the worker's dots.
template <class T>
class KeyReader {
 public:
  KeyReader(const core::Problem& p, int64_t stride, const T* shift, const T* const* vectors, int64_t vector_count,
            const DecodeWorker<T>& worker)
      : stride_(stride),
        vector_count_(vector_count),
        limit_(key_limit<T>(p)),
        shift_(shift),
        vectors_(vectors),
        tile_(worker.keys),
        dots_(worker.dots) {
    copied_.point_to(tile_, stride, kDecodeTile);
  }
  // Returns where the tile's keys can be read again: as stored, or in the worker's tile, where they are with kKeep and
  // where they cannot be read as stored. With kCheck, keys that are not finite are zero and marked in `bad`; without,
  // there must be none. `soon`: rows that come next.
  template <bool kCheck, bool kKeep>
  Readable<T> read(const TileSource& from, const TileRows& rows, const TileRows& soon, uint8_t* bad) {
    const core::Operand& t = from.call.k;
    const int64_t channels = from.call.problem.dim;
    any_bad_ = false;
    if (has_vectors<T>(t, channels, stride_)) {
      const Readable<T> stored(rows, t, shift_);
      const Bits<T> largest = row_dots<kCheck, kKeep>(stored, soon, stride_, vectors_, vector_count_, tile_, dots_);
      if (!kCheck || largest < limit_) return stored;
    }
    any_bad_ = load_any_tile(from, t, channels, stride_, shift_, limit_, tile_, bad);
    copied_.count = from.count;
    const Readable<T> copied(copied_);
    row_dots<false, false>(copied, TileRows(), stride_, vectors_, vector_count_, tile_, dots_);
    return copied;
  }
  bool any_bad() const { return any_bad_; }  // of the last tile

 private:
  int64_t stride_, vector_count_;
  Bits<T> limit_;
  const T* shift_;
  const T* const* vectors_;
  T *tile_, *dots_;
  TileRows copied_;
  bool any_bad_ = false;
};

constexpr int kAccumulators = kRows == 12 ? 24 : 12;  // registers for sums

// c[m][n] += sum over j of a[j][m] b[j][n], M numbers by N vectors, of rows `stride` apart.
template <int M, int N, class T>
HWY_INLINE void outer_block(const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, int64_t stride, int64_t count,
                            T* HWY_RESTRICT c) {
  Vec<T> sums[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sums[m][n] = hn::Zero(Tag<T>());
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec<T> row[N];
    for (int n = 0; n < N; ++n) row[n] = load(b + n * kLanes<T>);
    for (int m = 0; m < M; ++m) {
      const auto factor = splat(a[m]);
      for (int n = 0; n < N; ++n) sums[m][n] = hn::MulAdd(factor, row[n], sums[m][n]);
    }
    a += stride;
    b += stride;
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      T* const to = c + (m * N + n) * kLanes<T>;
      store(hn::Add(load(to), sums[m][n]), to);
    }
  }
}

// The sums of M coefficients a row, kDecodeTile apart, with rows.
template <int M, int N, bool kShift, class Stored, class T>
HWY_INLINE void sum_columns(const T* a, const TileRows& rows, const TileRows& soon, int64_t from, int64_t stride,
                            const T* shift, T* c) {
  for (; from + N * kLanes<T> <= stride; from += N * kLanes<T>) {
    Vec<T> sums[M][N];
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) sums[m][n] = hn::Zero(Tag<T>());
    }
    for (int64_t j = 0; j < rows.count; ++j) {
      if (from == 0 && j % 4 == 0) soon.fetch(j);
      const Stored* const row = reinterpret_cast<const Stored*>(rows.row[j]) + from;
      Vec<T> v[N];
      for (int n = 0; n < N; ++n) {
        v[n] = load_stored<T>(row + n * kLanes<T>);
        if (kShift) v[n] = hn::Sub(v[n], load(shift + from + n * kLanes<T>));
      }
      for (int m = 0; m < M; ++m) {
        const auto factor = splat(a[m * kDecodeTile + j]);
        for (int n = 0; n < N; ++n) sums[m][n] = hn::MulAdd(factor, v[n], sums[m][n]);
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) store(sums[m][n], c + m * stride + from + n * kLanes<T>);
    }
  }
  if constexpr (N > 1) sum_columns<M, N / 2, kShift, Stored>(a, rows, soon, from, stride, shift, c);
}
// c[i] = sum over j of a[i][j] row j, for 1, 2 or a multiple of 2 coefficients a row; c's rows are `stride` apart.
template <class T>
void sum_rows(const Readable<T>& from, const TileRows& soon, int64_t stride, int64_t coefficients, const T* a, T* c) {
  constexpr int kMost = kAccumulators / 3 * 2;
  visit_stored(from, [&](auto stored, auto kShift) HWY_ATTR {
    using Stored = decltype(stored);
    const auto sum = [&](auto kCount, const T* of, T* to) HWY_ATTR {
      sum_columns<kCount(), std::min(8, kMost / kCount()), kShift(), Stored>(of, *from.rows, soon, 0, stride,
                                                                             from.shift, to);
    };
    if (coefficients == 1) return sum(std::integral_constant<int, 1>(), a, c);
    for (int64_t i = 0; i < coefficients; i += 4) {
      const T* const of = a + i * kDecodeTile;
      if (coefficients - i > 2) {
        sum(std::integral_constant<int, 4>(), of, c + i * stride);
      } else {
        sum(std::integral_constant<int, 2>(), of, c + i * stride);
      }
    }
  });
}

template <class T>
bool all_finite(const T* values, int64_t count) {
  auto sum = hn::Zero(Tag<T>());
  for (int64_t e = 0; e < count; e += kLanes<T>) sum = hn::MulAdd(load(values + e), hn::Zero(Tag<T>()), sum);
  return hn::GetLane(hn::SumOfLanes(Tag<T>(), sum)) == 0;
}

// c[i] = sum over j of a[i][j] v_j for two coefficients a row; c's rows are `stride` apart. A value that is not finite
// is left out and marked in `bad`; returns whether there is one. `values` is room for a tile.
template <class T>
bool sum_values(const TileSource& from, const TileRows& rows, const TileRows& soon, const core::Problem& p,
                int64_t stride, int64_t coefficients, const T* a, T* values, T* c, uint8_t* bad) {
  const core::Operand& t = from.call.v;
  if (has_vectors<T>(t, p.value_dim, stride)) {
    sum_rows(Readable<T>(rows, t, nullptr), soon, stride, coefficients, a, c);
    // Whatever its coefficient, a value that is not finite makes every sum of its channel so.
    if (all_finite(c, coefficients * stride)) return false;
  }
  const bool any = load_any_tile<T>(from, t, p.value_dim, stride, nullptr, infinity_bits<T>(), values, bad);
  TileRows copied;
  copied.point_to(values, stride, from.count);
  sum_rows(Readable<T>(copied), TileRows(), stride, coefficients, a, c);
  return any;
}

// The upper triangle of sum over j of row_j row_j^T in blocks of kTriangleRows rows by up to three vectors, one behind
// the other. visit(first row, first column, vectors, place of the block).
constexpr int kTriangleRows = kRows == 12 ? 8 : 4;
static_assert(kTriangleRows * 3 <= kAccumulators);
template <class T, class Visit>
HWY_INLINE int64_t for_triangle(int64_t dim, int64_t stride, const Visit& visit) {
  int64_t at = 0;
  for (int64_t row = 0; row < dim; row += kTriangleRows) {
    for (int64_t column = row / kLanes<T> * kLanes<T>; column < stride;) {
      const int64_t left = (stride - column) / kLanes<T>;
      const int64_t vectors = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
      visit(row, column, vectors, at);
      at += kTriangleRows * vectors * kLanes<T>;
      column += vectors * kLanes<T>;
    }
  }
  return at;
}

template <class T>
HWY_NOINLINE void add_triangle(const T* tile, int64_t dim, int64_t stride, int64_t count, T* triangle,
                               const TileRows& soon) {
  int64_t fetched = 0;
  for_triangle<T>(dim, stride, [&](int64_t row, int64_t column, int64_t vectors, int64_t at) HWY_ATTR {
    for (const int64_t until = fetched + 8; fetched < until; fetched += 4) soon.fetch(fetched);  // 64 rows in 10 blocks
    const T *const a = tile + row, *const b = tile + column;
    T* const c = triangle + at;
    if (vectors == 3) return outer_block<kTriangleRows, 3>(a, b, stride, count, c);
    if (vectors == 2) return outer_block<kTriangleRows, 2>(a, b, stride, count, c);
    outer_block<kTriangleRows, 1>(a, b, stride, count, c);
  });
}

template <class T>
DecodeSizes sizes_of(int64_t dim, int64_t value_dim) {
  DecodeSizes s;
  const int64_t unit = std::max<int64_t>(kLanes<T>, kTriangleRows);  // no block of the triangle reads over a row's end
  s.key_stride = round_up(dim, unit);
  s.value_stride = round_up(value_dim, kLanes<T>);
  s.entries = for_triangle<T>(dim, s.key_stride, [](int64_t, int64_t, int64_t, int64_t) {});
  return s;
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
