// Which part of which row a block works on. Plain functions for host and device: the tests run them on the CPU.
//
// The rows of all decoded sequences, one after the other, each as long as its keys take granules, make one line; every
// block takes the same share of it. A block works on units: the parts of its share that lie in one row. Unit (row,
// block) has slot row + block: walking along the line either the row or the block goes up, so no two units share one.
#pragma once

#include "cuda/sm90/decode/params.hpp"

namespace lla::cuda::sm90::decode {

inline constexpr int kGranule = 128;  // keys

struct Keys {
  int32_t begin, end;
};

struct Sequence {
  int32_t start_q, length_q;  // rows: queries of the sequence
  int32_t length;             // keys
  int32_t first;              // visible key
  int32_t rows;               // decoded here: 0 where the forward takes them
  int32_t granules;           // of each row
  bool invalid;
};

constexpr int32_t clamp_to(int64_t x, int32_t low, int32_t high) {
  return static_cast<int32_t>(x < low ? low : x > high ? high : x);
}

constexpr Keys keys_of(const Params& p, const Sequence& s, int32_t i) {
  const int64_t diagonal = int64_t{i} + s.length - s.length_q;
  const int32_t begin = p.left < 0 ? s.first : clamp_to(diagonal - p.left, s.first, s.length);
  const int32_t end = p.right < 0 ? s.length : clamp_to(diagonal + p.right + 1, begin, s.length);
  return {begin, end < begin ? begin : end};
}

constexpr Sequence sequence_at(const Params& p, int32_t b) {
  Sequence s{};
  s.start_q = p.cu_q ? p.cu_q[b] : 0;
  s.length_q = p.cu_q ? p.cu_q[b + 1] - s.start_q : p.seqlen_q;
  if (p.cu_q && (s.start_q < 0 || s.length_q <= 0 || p.cu_q[b + 1] > p.total_q)) {
    s.length_q = 0;  // flat, decreasing or outside: it has no rows
    return s;
  }
  s.length = p.cache.lengths[b];
  const int32_t first = p.cache.first_key ? p.cache.first_key[b] : 0;
  s.invalid = s.length < 0 || s.length > p.cache.max_length || first < 0 || s.length_q > p.seqlen_q;
  if (s.invalid) s.length = 0;
  s.first = first < 0 ? 0 : first < s.length ? first : s.length;
  if (s.length_q * p.group > p.most_rows) return s;
  s.rows = s.length_q * p.heads_q;
  int32_t most = 0;
  const Keys a = keys_of(p, s, 0), z = keys_of(p, s, s.length_q - 1);
  most = a.end - a.begin > z.end - z.begin ? a.end - a.begin : z.end - z.begin;
  if (s.length_q > 1 && p.left >= 0) {  // rows in the middle may see more than both ends
    const int64_t window = p.right < 0 ? s.length : int64_t{p.left} + p.right + 1;
    most = clamp_to(window, most, s.length - s.first);
  }
  s.granules = most > 0 ? (most + kGranule - 1) / kGranule : 1;
  return s;
}

// Row r of a sequence: query and head. Rows of a key head lie together.
struct RowPlace {
  int32_t head, index;
};
constexpr RowPlace row_place(const Params& p, const Sequence& s, int32_t r) {
  return {r / s.length_q, r % s.length_q};
}

// Of a launch's rows [first_row, first_row + row_count), those of a sequence whose rows begin at `before`.
struct RowShare {
  int32_t skip, count;
};
constexpr RowShare row_share(const Params& p, int32_t before, int32_t rows) {
  const int64_t low = int64_t{p.first_row} - before, high = low + p.row_count;
  const int32_t begin = clamp_to(low, 0, rows), end = clamp_to(high, 0, rows);
  return {begin, end - begin};
}

constexpr int64_t share_begin(int64_t granules, int block, int blocks) { return granules * block / blocks; }

}  // namespace lla::cuda::sm90::decode
