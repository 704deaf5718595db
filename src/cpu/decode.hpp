// Few rows over many keys, as in generation: the keys of a few rows are cut into spans at fixed places, so that all
// threads work on one sequence and no result depends on their number. docs/decode.md says how and why.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cpu/memory.hpp"

namespace lla::cpu {

constexpr int64_t kDecodeRows = 4;    // rows of a unit at most: they share every tile of keys
constexpr int64_t kDecodeTile = 64;   // keys converted at a time
constexpr int64_t kDecodeSum = 2048;  // keys summed in the unit's arithmetic; from there on sums are double
constexpr int64_t kDecodeSpans = 16;  // spans of a unit at most

// Magnitude from which a key counts as not finite: a matter of the caller's type, not of the arithmetic.
template <class T>
Bits<T> key_limit(const core::Problem& p) {
  return magnitude_bits(static_cast<T>(p.dtype == DType::f64 ? 0x1p500 : 0x1p56));
}

// Which rows of which kv head a unit holds.
struct DecodeJob {
  int64_t batch = 0, kv_head = 0;
  int64_t first_row = 0, rows = 0;
};

// What one span of keys adds up to, for one row, in units of 4^-max. The matrix is the upper triangle of the sum of
// w (k - c)(k - c)^T in the blocks the kernel forms it in.
struct SpanSums {
  double max = 0;  // integer, of logit / 2 in log2 units; -infinity where the row sees none of the keys
  double omega = 0, omega_squares = 0;
  double coefficients = 0;    // sum of w E
  bool bad = false;           // a key or value the row sees is not finite
  bool bad_keys = false;      // of the span's first row: so is one of the span, whoever sees it
  double* keys = nullptr;     // sum of w (k - c)
  double* image = nullptr;    // sum of w E (k - c)
  double* values = nullptr;   // sum of w v
  double* steered = nullptr;  // sum of w E v
  double* matrix = nullptr;
};

enum class DecodeState {
  idle,     // nothing to do: no row, no key, one key, or the row is NaN
  solving,  // its x is to be tried
  done,
  failed  // the arithmetic does not reach the tolerance: once more in double
};

// One row of a unit. T is the arithmetic of sums over keys; what is done once a row is done in double.
template <class T>
struct DecodeRow {
  int64_t begin, end;             // keys it sees
  int64_t position, head, index;  // in the caller's tensors; in the info outputs
  DecodeState state;
  bool bad;
  int32_t status;
  double max, omega, omega_squares, centre, residual_squares;
  int refinements;
  T *query, *vector;  // query: times scale log2(e) / 2; vector: x, less what it lacks in T
  T* logits;          // half of them, from the unit's base on
  double *query_as_given, *ridge, *rhs, *mean_k, *solution, *diagonal, *inverse;
  double* matrix;  // packed triangle once merged
  double* factor;  // dim x dim
};

template <class T>
struct DecodeUnit {
  const core::ForwardCall* call;
  core::Sequence sequence;
  int64_t kv_head, first_row, rows;
  int64_t begin, end, base;  // keys some row sees; base: where tiles are counted from
  int64_t spans, span_keys;
  T* shift;  // as of PackedHead
  bool shifted;
  DecodeRow<T> row[kDecodeRows];
  SpanSums* sums;  // [span][row]
};

template <class T>
struct DecodeWorker {
  T *keys, *scaled, *values;  // a tile each, [key][channel]
  T* coefficients;            // [2 a row][key]
  T* dots;                    // [2 rows][key]
  T* triangle;                // [row][entries]
};

// Sizes that depend on this machine's vectors.
struct DecodeSizes {
  int64_t key_stride, value_stride, entries;  // of a tile's rows; of a packed triangle
};

// The steps of a unit on this machine, each over what the step before left. Solved rows: statistics of every span,
// merge of every piece, solve of every row, then apply to every span and output until no row is solving. Rows with x
// given: statistics and output.
constexpr int64_t kDecodePieces = 8;
template <class T>
struct DecodeSteps {
  DecodeSizes (*sizes)(int64_t dim, int64_t value_dim);
  void (*statistics)(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker);
  void (*merge)(DecodeUnit<T>& unit, int64_t row, int64_t piece);
  void (*solve)(DecodeUnit<T>& unit, int64_t row);
  void (*apply)(DecodeUnit<T>& unit, int64_t span, const DecodeWorker<T>& worker);
  // Whether the row's output could be written; it is still solving, or idle, or has failed otherwise.
  bool (*output)(DecodeUnit<T>& unit, int64_t row, double* output);
};
template <class T>
DecodeSteps<T> decode_steps();

}  // namespace lla::cpu
