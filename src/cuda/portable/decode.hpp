// Sequences of a cache with few rows: each row is solved on its own, directly and in double, its keys split over
// blocks. How the keys are split depends on the row alone, so that nothing else in the batch changes its bits. Host
// code: the planner and its tests read the same numbers as the kernels.
#pragma once

#include <algorithm>

#include "core/problem.hpp"
#include "cuda/portable/config.hpp"

namespace lla::cuda::portable {

// Rows of a key head (queries times query heads) up to which a sequence is decoded.
inline constexpr int64_t kMostDecodedRows = 32;

constexpr bool may_decode(const core::Problem& p) { return p.cache && p.solver != Solver::cg; }
// Whether some sequence may be left to the kernels that take blocks of rows; where none is, decode takes also those
// that claim more rows than their bound and are invalid for it.
constexpr bool has_block_rows(const core::Problem& p) {
  return !may_decode(p) || p.seqlen_q * p.group() > kMostDecodedRows;
}
constexpr bool has_decoded_rows(const core::Problem& p) { return may_decode(p) && (p.packed || !has_block_rows(p)); }
constexpr bool decodes(const core::Problem& p, int64_t length_q) {
  return has_decoded_rows(p) && (!has_block_rows(p) || length_q * p.group() <= kMostDecodedRows);
}
// Queries of a sequence that is decoded, at most.
constexpr int64_t most_decoded_queries(const core::Problem& p) {
  return has_block_rows(p) ? std::min(p.seqlen_q, kMostDecodedRows / p.group()) : p.seqlen_q;
}

// A row's keys are cut into spans of equal length.
struct KeySpans {
  static constexpr int64_t kMost = 64, kLeastKeys = 1024;
  static constexpr int64_t count(int64_t keys) {
    const int64_t spans = (keys + kLeastKeys - 1) / kLeastKeys;  // (std::clamp would take addresses of constants)
    return spans < 1 ? 1 : spans < kMost ? spans : kMost;
  }
  static constexpr int64_t keys_of_each(int64_t keys) {
    const int64_t spans = count(keys), tile = DirectConfig::kKeys;
    return ((keys + spans - 1) / spans + tile - 1) / tile * tile;
  }
};

// What decode keeps in the workspace, in doubles. Of a span: a head, then sums of keys and the matrix, or sums of
// values. Of a row: a head, the mean key, x.
struct DecodeLayout {
  static constexpr int64_t kHead = 4;
  int64_t rows = 0;   // (sequence, head, query) that there may be
  int64_t spans = 0;  // of a row, at most
  int64_t span_elements = 0, row_elements = 0;
  int64_t rows_at_once = 0;  // more go in several launches
  int64_t bytes = 0;

  constexpr explicit DecodeLayout(const core::Problem& p) {
    if (!has_decoded_rows(p)) return;
    constexpr int64_t kMostBytes = int64_t{64} << 20;
    rows = p.batch * p.heads_q * most_decoded_queries(p);
    spans = KeySpans::count(p.seqlen_k);
    const int64_t padded = DirectConfig::padded(p.dim);
    const int64_t solved = padded + DirectConfig::matrix_elements(p.dim);
    span_elements = kHead + (p.given_x() ? 2 * p.value_dim : std::max(solved, p.value_dim));
    row_elements = kHead + 2 * padded;
    const int64_t row_bytes = (spans * span_elements + row_elements) * 8;
    rows_at_once = std::clamp<int64_t>(kMostBytes / row_bytes, std::min<int64_t>(rows, 1), std::max<int64_t>(rows, 1));
    bytes = rows_at_once * row_bytes;
  }
};

}  // namespace lla::cuda::portable
