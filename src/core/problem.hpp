// The canonical description of one call. validate/ makes it from the public arguments; planner and kernels read only
// this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/tolerance.hpp"
#include "lla/lla.hpp"

namespace lla::core {

enum class Operation { forward, backward };
enum class Device { cpu, cuda };

// What the ridge varies over.
enum class RidgeShape { none /* x is given */, scalar, head, token, dimension };

// Which keys a query sees: query i of a sequence (q of lq) sees keys [begin, end) of lk, aligned bottom-right.
// causal is folded into right = 0; -1 means unbounded.
struct Mask {
  int64_t left = -1;
  int64_t right = -1;

  constexpr int64_t begin(int64_t i, int64_t lq, int64_t lk) const {
    return left < 0 ? 0 : std::clamp<int64_t>(i + lk - lq - left, 0, lk);
  }
  constexpr int64_t end(int64_t i, int64_t lq, int64_t lk) const {
    return right < 0 ? lk : std::clamp<int64_t>(i + lk - lq + right + 1, 0, lk);
  }
};

// Sizes, types and options: everything a decision may depend on, no pointers.
struct Problem {
  Operation operation = Operation::forward;
  Device device = Device::cpu;
  int device_index = 0;
  DType dtype = DType::f32;      // q, k, v
  DType out_dtype = DType::f32;  // o, or the gradients of q, k, v, x
  bool packed = false;           // queries, and keys too unless they are in a cache
  bool cache = false;            // k and v are a cache (KeyCache)
  int64_t batch = 0;             // sequences
  int64_t seqlen_q = 0;          // longest sequence when packed
  int64_t seqlen_k = 0;          // in a cache: bound of the lengths
  int64_t total_q = 0;           // rows of q over all sequences: batch * seqlen_q unless packed
  int64_t total_k = 0;           // in a cache: bound of the keys of all sequences that do not decode
  int64_t page_size = 0;         // of a cache; 0: contiguous
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t dim = 0;
  int64_t value_dim = 0;
  RidgeShape ridge = RidgeShape::scalar;
  double scale = 1;
  Mask mask;
  double tolerance = 1e-3;
  int max_iterations = 64;
  Solver solver = Solver::automatic;
  Weights weights = Weights::automatic;
  Precision precision = Precision::full;
  int64_t cached_weights_limit = int64_t{1} << 30;
  bool batch_invariant = false;  // a sequence's bits do not depend on the others

  constexpr bool packed_keys() const { return packed && !cache; }
  constexpr bool given_x() const { return ridge == RidgeShape::none; }
  constexpr int64_t group() const { return heads_kv > 0 ? heads_q / heads_kv : 1; }  // without heads: any
  constexpr int64_t rows() const { return total_q * heads_q; }  // rows of the saved and info outputs
};

// A (batch, position, head, channel) view; packed tensors have stride[0] == 0, broadcast dimensions stride 0.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::none;
  int64_t stride[4] = {0, 0, 0, 0};

  constexpr explicit operator bool() const { return dtype != DType::none; }
};

// Row order of the saved and info outputs: r = (b Hq + h) Lq + i, packed h total_q + position.
struct RowOutputs {
  int32_t* iterations = nullptr;
  float* residual = nullptr;
  int32_t* status = nullptr;
};

// Keys and values in a cache: how many each sequence has and where they lie. Small and whole, so that a kernel can take
// it as it is; the strides are those of k and v (page or sequence, slot, head, channel).
struct KeyCache {
  const int32_t* lengths = nullptr;    // (batch), new tokens included; null: k and v are no cache
  const int32_t* first_key = nullptr;  // (batch): the keys before it are invisible; null: all are visible
  const int32_t* table = nullptr;      // pages of each sequence; null: the cache is contiguous
  int64_t table_stride = 0;            // entries from one sequence's pages to the next one's
  int64_t page_size = 0;               // 0: contiguous
  int64_t pages = 0;                   // that there are
  int64_t max_length = 0;              // bound of the lengths

  constexpr explicit operator bool() const { return lengths != nullptr; }
  // The first two indices of sequence b's key j in k and v. An entry of the table may be out of range: see has_page.
  constexpr int64_t page(int64_t b, int64_t j) const {
    return page_size > 0 ? table[b * table_stride + j / page_size] : b;
  }
  constexpr int64_t slot(int64_t j) const { return page_size > 0 ? j % page_size : j; }
  constexpr bool has_page(int64_t page) const { return page >= 0 && page < pages; }
};

// Offsets, in elements, of the sections of the saved vector (documented at lla_forward_sizes).
// The vectors come first: where head dimensions are multiples of 4 or 8, they begin at 16 bytes. Every row takes
// equally much, so that the size is a multiple of the rows (python/lla/_ops.py counts on it for symbolic lengths).
struct SavedLayout {
  int64_t max, omega, mean_k, mean_v, x, size;

  explicit SavedLayout(const Problem& p) {
    int64_t at = 0;
    const auto take = [&](int64_t n) { return std::exchange(at, at + n); };
    mean_k = take(p.rows() * p.dim);
    mean_v = take(p.rows() * p.value_dim);
    x = take(p.rows() * p.dim);
    max = take(p.rows());
    omega = take(p.rows());
    size = at;
  }
};

struct ForwardCall {
  Problem problem;
  Operand q, k, v, ridge, x, o;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  KeyCache cache;
  void* saved = nullptr;  // f32, or f64 where dtype is f64; null when not asked for
  RowOutputs info;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
};

struct BackwardCall {
  Problem problem;
  Operand q, k, v, ridge, x, grad_o;
  Operand dq, dk, dv, dridge, dx;  // absent where not wanted
  const void* saved = nullptr;
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  RowOutputs info;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
};

constexpr StopRule stop_rule(const Problem& p) {
  return p.operation == Operation::forward ? forward_stop_rule(p.tolerance, p.dim)
                                           : backward_stop_rule(p.tolerance, p.dtype, p.dim);
}

// One sequence of a call: where its rows start and how many there are.
struct Sequence {
  int64_t batch;    // index for the batch stride
  int64_t start_q;  // position offset (0 unless packed)
  int64_t start_k;
  int64_t length_q;
  int64_t length_k;
  int64_t first_key = 0;  // of a cache: the keys before it are invisible
  bool valid = true;      // of a cache: otherwise the rows are NaN, LLA_ROW_INVALID, and no key is looked at
};

constexpr Sequence sequence(const Problem& p, const int32_t* cu_q, const int32_t* cu_k, int64_t b) {
  if (!p.packed) return {b, 0, 0, p.seqlen_q, p.seqlen_k};
  return {0, cu_q[b], cu_k[b], cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]};
}

// The rows that the sequences before b claim: what `sequence` below begins with.
constexpr int64_t rows_before(const int32_t* cu_q, int64_t b) {
  int64_t rows = 0;
  for (int64_t i = 1; i <= b; ++i) rows = std::max<int64_t>(rows, cu_q[i]);
  return rows;
}

// Sequence b over a cache. What a device reads is not to be believed: with `before` = rows_before(cu_q, b), whatever
// cu_seqlens_q holds, every row before its largest entry belongs to one sequence and none lies outside. (On the host,
// where validate has read it, before = cu_q[b].) `batch` counts for the keys; packed queries have batch stride 0.
constexpr Sequence sequence(const Problem& p, const int32_t* cu_q, const KeyCache& cache, int64_t b, int64_t before) {
  Sequence s{b, 0, 0, p.seqlen_q, cache.lengths[b]};
  if (p.packed) {
    s.start_q = std::min(before, p.total_q);
    s.length_q = std::clamp<int64_t>(cu_q[b + 1], s.start_q, p.total_q) - s.start_q;
    s.valid = cu_q[b] == s.start_q && cu_q[b + 1] == s.start_q + s.length_q && s.length_q <= p.seqlen_q;
  }
  if (cache.first_key != nullptr) s.first_key = cache.first_key[b];
  s.valid = s.valid && s.length_k >= 0 && s.length_k <= cache.max_length && s.first_key >= 0;
  return s;
}

// Sequence b of a call that runs on the host, where validate has read everything.
constexpr Sequence sequence(const ForwardCall& call, int64_t b) {
  const Problem& p = call.problem;
  if (!p.cache) return sequence(p, call.cu_seqlens_q, call.cu_seqlens_k, b);
  return sequence(p, call.cu_seqlens_q, call.cache, b, p.packed ? call.cu_seqlens_q[b] : 0);
}
constexpr Sequence sequence(const BackwardCall& call, int64_t b) {
  return sequence(call.problem, call.cu_seqlens_q, call.cu_seqlens_k, b);
}

// The keys that rows [first, last] of a sequence see, from the first one's to the last one's; end >= begin.
struct KeyRange {
  int64_t begin, end;
};
constexpr KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t first, int64_t last) {
  const int64_t begin = std::max(mask.begin(first, s.length_q, s.length_k), std::min(s.first_key, s.length_k));
  return {begin, std::max(begin, mask.end(last, s.length_q, s.length_k))};
}
constexpr KeyRange visible_keys(const Mask& mask, const Sequence& s) {
  return s.length_q > 0 ? visible_keys(mask, s, 0, s.length_q - 1) : KeyRange{0, 0};
}

// Index of a query's row in the saved and info outputs.
constexpr int64_t row_index(const Problem& p, const Sequence& s, int64_t head, int64_t i) {
  return p.packed ? head * p.total_q + s.start_q + i : (s.batch * p.heads_q + head) * p.seqlen_q + i;
}

}  // namespace lla::core
