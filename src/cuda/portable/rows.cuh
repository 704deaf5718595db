// A block's rows: which queries they are, what they see, and sums along them.
#pragma once

#include <algorithm>
#include <limits>
#include <numbers>

#include "core/convert.hpp"
#include "cuda/portable/arguments.hpp"
#include "cuda/portable/tile.cuh"

namespace lla::cuda::portable {

// Sum, maximum over the sixteen threads of a row; every one gets the result.
template <class T>
__device__ __forceinline__ T row_sum(T v) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}
template <class T>
__device__ __forceinline__ T row_max(T v) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) v = fmax(v, __shfl_xor_sync(~0u, v, offset));
  return v;
}
__device__ __forceinline__ bool row_any(bool v) {
  const unsigned all = __ballot_sync(~0u, v);
  return (threadIdx.x % 32 < kLanes ? all & 0xffffu : all >> kLanes) != 0;
}

__device__ __forceinline__ float exp2_of(float x) { return exp2f(x); }
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }

// A key's weight from q.k. Every pass takes it from here, to the last bit: rows whose weights do not sum to omega in
// the backward have lost what is left of gradients that cancel.
template <class T>
__device__ __forceinline__ T weight_of(T dot, T log2_factor, T max) {
  return exp2_of(fma(dot, log2_factor, -max));
}

// Of a row without a gradient: below every other.
inline constexpr int32_t kNoExponent = std::numeric_limits<int32_t>::min() / 2;

// 2^exponent <= x < 2^(exponent + 1); kNoExponent for zero and what is not finite.
template <class T>
__device__ __forceinline__ int32_t exponent_of(T x) {
  return x > T(0) && isfinite(x) ? ilogb(x) : kNoExponent;
}

// x 2^exponent, also where the power alone is out of the type's range; too large is infinite.
template <class T>
class PowerOfTwo {
 public:
  __device__ explicit PowerOfTwo(int32_t exponent) {
    const int32_t within = min(max(exponent, -2 * kLargest), 2 * kLargest);
    first_ = power(within / 2);
    second_ = power(within - within / 2);
  }
  __device__ T operator()(T x) const { return x * first_ * second_; }
  __device__ double wide(T x) const { return static_cast<double>(x) * first_ * second_; }

 private:
  static constexpr int32_t kLargest = std::numeric_limits<T>::max_exponent - 2;  // of a power that has a reciprocal
  __device__ static T power(int32_t exponent) {
    const int32_t biased = exponent + std::numeric_limits<T>::max_exponent - 1;
    if constexpr (sizeof(T) == 8) {
      return __hiloint2double(biased << 20, 0);
    } else {
      return __int_as_float(biased << 23);
    }
  }
  T first_, second_;
};

// Multiplies row `row` of a tile by 2^exponent(row); every thread what it loaded itself.
template <int kRows, class C, class T, int kDim, class Exponent>
__device__ __forceinline__ void scale_tile(Tile<T, kDim> tile, int columns, Exponent exponent) {
  for (int row = team(); row < kRows; row += C::kRowTeams) {
    const PowerOfTwo<T> scale(exponent(row));
    for (int c = lane(); c < columns; c += kLanes) {
      Vec<T>& v = tile.vec(row, c);
#pragma unroll
      for (int e = 0; e < Vec<T>::kSize; ++e) v.at[e] = scale(v.at[e]);
    }
  }
}

template <class T>
__device__ __forceinline__ T nan_value() {
  return std::numeric_limits<T>::quiet_NaN();
}

// Factor from q.k to logits in log2 units.
template <class T>
__device__ __forceinline__ T log2_scale(const core::Problem& p) {
  return static_cast<T>(p.scale * std::numbers::log2e);
}

// One tile of queries of one head of one sequence.
struct QueryBlock {
  int64_t number;  // of the sequence
  core::Sequence sequence;
  int64_t head;
  int64_t first;      // query index within the sequence
  int64_t count;      // queries; may be below the tile's size, not positive when the sequence is shorter
  int64_t row;        // index of the first query in the row arrays
  int64_t key_begin;  // keys any of them sees lie in [key_begin, key_end)
  int64_t key_end;
};

// Sequence b of the call. Lengths and cu_seqlens_q of a cache are read here and not believed; where one is out of
// bounds the sequence is not valid.
template <class T>
__device__ __forceinline__ core::Sequence sequence_of(const Arguments<T>& a, int64_t b) {
  const core::Problem& p = a.problem;
  if (!p.cache) return core::sequence(p, a.cu_seqlens_q, a.cu_seqlens_k, b);
  return core::sequence(p, a.cu_seqlens_q, a.cache, b, p.packed ? core::rows_before(a.cu_seqlens_q, b) : 0);
}

// Where key or value j of a sequence lies in t, which is k or v: the one place that knows.
template <class T>
__device__ __forceinline__ int64_t key_offset(const Arguments<T>& a, const core::Operand& t, const core::Sequence& s,
                                              int64_t kv_head, int64_t j) {
  const int64_t outer = a.problem.cache ? a.cache.page(s.batch, j) : s.batch;
  const int64_t inner = a.problem.cache ? a.cache.slot(j) : s.start_k + j;
  return outer * t.stride[0] + inner * t.stride[1] + kv_head * t.stride[2];
}

// Blocks are numbered with the last queries first: under a causal mask they take longest.
template <class T>
__device__ QueryBlock query_block(const Arguments<T>& a, int64_t block, int own) {
  const core::Problem& p = a.problem;
  const int64_t heads = p.heads_q * p.batch;
  const int64_t tiles = (p.seqlen_q + own - 1) / own;
  QueryBlock result;
  result.head = block % heads % p.heads_q;
  result.number = block % heads / p.heads_q;
  result.sequence = sequence_of(a, result.number);
  const core::Sequence& s = result.sequence;
  result.first = (tiles - 1 - block / heads) * own;
  result.count = s.length_q - result.first < own ? s.length_q - result.first : own;
  result.row = core::row_index(p, s, result.head, result.first);
  const core::KeyRange keys = core::visible_keys(p.mask, s, result.first, result.first + result.count - 1);
  result.key_begin = keys.begin;
  result.key_end = keys.end;
  return result;
}

// One owned query.
struct Query {
  bool exists;
  int64_t index;  // within the sequence
  int64_t row;
  int64_t begin, end;  // keys it sees

  __device__ bool sees(int64_t key) const { return key >= begin && key < end; }
  __device__ int64_t keys() const { return end > begin ? end - begin : 0; }
};

template <class C>
__device__ Query owned_query(const core::Problem& p, const QueryBlock& block, int r) {
  const int own = team() + C::kRowTeams * r;
  Query q;
  q.exists = own < block.count;
  q.index = block.first + own;
  q.row = block.row + own;
  const core::KeyRange keys =
      q.exists ? core::visible_keys(p.mask, block.sequence, q.index, q.index) : core::KeyRange{0, 0};
  q.begin = keys.begin;
  q.end = keys.end;
  return q;
}

// Sources of this block's rows and of its keys.
template <class T>
__device__ Source query_rows(const core::Operand& t, const QueryBlock& b, int64_t columns) {
  return tensor_rows<T>(t, b.sequence.batch, b.sequence.start_q + b.first, b.head, columns);
}
template <class T>
__device__ Source cached_rows(const Arguments<T>& a, const core::Operand& t, const core::Sequence& s, int64_t kv_head,
                              int64_t columns) {
  if (a.cache.page_size == 0) return tensor_rows<T>(t, s.batch, s.start_k, kv_head, columns);
  Source rows = tensor_rows<T>(t, 0, 0, kv_head, columns);
  rows.pages = a.cache.table + s.batch * a.cache.table_stride;
  rows.page_size = a.cache.page_size;
  rows.page_stride = t.stride[0];
  return rows;
}
// What is taken off the keys of a head of sequence `number`.
template <class T>
__device__ __forceinline__ T* shift_of(const Arguments<T>& a, int64_t number, int64_t kv_head) {
  return a.shift + (number * a.problem.heads_kv + kv_head) * a.problem.dim;
}
template <class T>
__device__ Source key_rows(const Arguments<T>& a, int64_t number, const core::Sequence& s, int64_t kv_head) {
  Source rows = cached_rows<T>(a, a.k, s, kv_head, a.problem.dim);
  rows.shift = shift_of(a, number, kv_head);
  return rows;
}
template <class T>
__device__ Source value_rows(const Arguments<T>& a, const core::Sequence& s, int64_t kv_head) {
  return cached_rows<T>(a, a.v, s, kv_head, a.problem.value_dim);
}

// Offset of a row of a (batch, position, head, channel) tensor.
__device__ __forceinline__ int64_t row_offset(const core::Operand& t, const core::Sequence& s, int64_t head,
                                              int64_t index) {
  return s.batch * t.stride[0] + (s.start_q + index) * t.stride[1] + head * t.stride[2];
}

// A ridge so large that the dimension is as good as removed; infinity is the documented way to ask for that. The bound
// keeps squares of what conjugate gradients computes with finite ridges in range.
template <class T>
__device__ __forceinline__ bool removes(T ridge) {
  return ridge >= (sizeof(T) == 8 ? T(1e150) : T(1e30));
}

template <class T>
__device__ __forceinline__ T ridge_at(const Arguments<T>& a, int64_t offset, int column) {
  return load_as<T>(a.ridge.data, a.ridge.dtype, offset + column * a.ridge.stride[3]);
}

// Rows whose x comes from a solve.
__device__ __forceinline__ bool is_regular(int32_t kind) { return kind == kRegular || kind == kUnfinished; }

// A row of values near the end of the range whose output its type cannot hold says so.
template <class T>
__device__ __forceinline__ void report_overflow(const Arguments<T>& a, int64_t row, int32_t kind, double o) {
  if (kind == kBad || kind == kEmpty || fabs(o) <= core::largest_finite(a.o.dtype)) return;
  if (a.info.status) a.info.status[row] = LLA_ROW_BREAKDOWN;
}

template <class T>
__device__ __forceinline__ bool solved_directly(const Arguments<T>& a, const Query& q) {
  return q.keys() <= a.direct_keys;
}

// Number of blocks of a kernel over tiles of `own` rows.
inline int64_t tile_blocks(int64_t length, int64_t own, int64_t heads, int64_t batch) {
  return (length + own - 1) / own * heads * batch;
}

}  // namespace lla::cuda::portable
