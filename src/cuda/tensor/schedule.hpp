// Which block of queries a work item is, and which key tiles it visits. Plain functions for host and device: the tests
// run them on the CPU.
//
// Items are numbered longest first: under a causal mask the last blocks of queries see most keys, so all heads' last
// blocks come first. Where there is a solve, blocks that see few keys come before them, because they take most
// iterations; among these, too, those that see most keys come first.
// Heads go in bundles whose keys and values the L2 cache can hold; all items of a bundle come before those of the next.
// Blocks take items from a counter in the order of their numbers; an item's result does not depend on who runs it.
#pragma once

#include <cstdint>

#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::tensor {

inline constexpr int kWarpgroupRows = 64;              // queries of a warpgroup
inline constexpr int kBlockRows = 2 * kWarpgroupRows;  // of a block of two

// Queries that see no more keys than this take most iterations, and their first steps are much larger than the
// solution.
constexpr int few_keys(int dim) { return 2 * dim; }

// How the kernels find a sequence's rows and keys. The number is the distance of two sequences' entries in the lists.
enum Spans : int32_t {
  kNoSpans = 0,      // dense: all sequences are equally long
  kPackedSpans = 1,  // cu_seqlens; the copies of the keys are packed as they are, statistics are of all sequences
  kOwnSpans = 2      // begin and end of each sequence, and statistics of its own: caches
};

// Sizes the schedule depends on. Lengths fit in 31 bits.
struct Shape {
  int32_t batch = 0, heads_q = 0, group = 1;  // group: query heads per key head
  int32_t seqlen_q = 0, seqlen_k = 0;         // longest when packed
  int32_t total_q = 0, total_k = 0;           // packed only
  int32_t packed = 0;                         // rows of q, o and what belongs to them lie packed
  Spans spans = kNoSpans;
  int32_t left = -1, right = -1;  // window; causal is right = 0, -1 unbounded
  int32_t bundle = 0;             // (batch, query head) pairs of a bundle; 0: all
  int32_t early_rows = 0;         // queries at the start of a sequence whose blocks come first

  // `rows` queries make an item.
  constexpr int64_t q_blocks(int rows = kBlockRows) const { return (int64_t{seqlen_q} + rows - 1) / rows; }
  constexpr int64_t items(int rows = kBlockRows) const { return q_blocks(rows) * batch * heads_q; }
};

// A block of queries of one head of one sequence.
struct QueryBlock {
  int32_t batch, head;
  int32_t first_row;           // in its sequence
  int32_t length_q, length_k;  // of its sequence
  int32_t start_q, start_k;    // of its sequence where there are spans, else 0

  constexpr bool empty() const { return first_row >= length_q; }
  constexpr int32_t last_row(int32_t row, int32_t rows) const {
    return row + rows < length_q ? row + rows - 1 : length_q - 1;
  }
};

constexpr QueryBlock block_of_item(const Shape& s, const int32_t* cu_q, const int32_t* cu_k, int64_t item,
                                   int rows = kBlockRows) {
  // Items are fewer than 2^31 (the planner refuses more): division of 64-bit numbers is slow on the device.
  const uint32_t pairs = static_cast<uint32_t>(s.batch) * static_cast<uint32_t>(s.heads_q);
  const uint32_t blocks = static_cast<uint32_t>(s.q_blocks(rows));
  const uint32_t together = s.bundle > 0 ? static_cast<uint32_t>(s.bundle) : pairs;
  const uint32_t first_pair = static_cast<uint32_t>(item) / (together * blocks) * together;
  const uint32_t in_bundle = static_cast<uint32_t>(item) - first_pair * blocks;
  const uint32_t per_level = pairs - first_pair < together ? pairs - first_pair : together;
  const uint32_t level = in_bundle / per_level;  // NOLINT(clang-analyzer-core.DivideZero): an item has a pair
  const uint32_t pair = first_pair + in_bundle - level * per_level;
  QueryBlock b{};
  b.batch = static_cast<int32_t>(pair / static_cast<uint32_t>(s.heads_q));
  b.head = static_cast<int32_t>(pair) - b.batch * s.heads_q;
  const uint32_t wanted = static_cast<uint32_t>(s.early_rows) / static_cast<uint32_t>(rows);
  const uint32_t early = wanted < blocks ? wanted : blocks;
  const uint32_t place = level < early ? early - 1 - level : blocks - 1 - (level - early);
  b.first_row = static_cast<int32_t>(place * static_cast<uint32_t>(rows));
  b.length_q = s.seqlen_q;
  b.length_k = s.seqlen_k;
  if (s.spans != kNoSpans) {
    const int32_t at = b.batch * s.spans;
    b.start_q = cu_q[at];
    b.start_k = cu_k[at];
    b.length_q = cu_q[at + 1] - b.start_q;
    b.length_k = cu_k[at + 1] - b.start_k;
  }
  return b;
}

// Everything that is kept per query lies in the order of core::row_index. `position`: of the query in its sequence.
constexpr int64_t query_row(const Shape& s, int32_t batch, int32_t head, int32_t start_q, int32_t position) {
  return s.packed ? int64_t{head} * s.total_q + start_q + position
                  : (int64_t{batch} * s.heads_q + head) * s.seqlen_q + position;
}
// Which of what is kept per head of keys and values. Packed sequences share one unless they have spans of their own.
constexpr int32_t kv_copy(const Shape& s, int32_t heads_kv, int32_t batch, int32_t kv_head) {
  return s.spans == kPackedSpans ? kv_head : batch * heads_kv + kv_head;
}
// The row of a sequence's first key in the copies.
constexpr int64_t first_key_row(const Shape& s, int32_t copy_index, int32_t kv_head, int32_t start_k) {
  return s.spans == kNoSpans ? int64_t{copy_index} * s.seqlen_k : int64_t{kv_head} * s.total_k + start_k;
}

// Keys [begin, end) of a range of queries: what the union of their masks covers.
struct KeyRange {
  int32_t begin, end;
};

constexpr int32_t clamp_key(int64_t key, int32_t length) {
  return key < 0 ? 0 : key > length ? length : static_cast<int32_t>(key);
}

// A query whose place on the (bottom-right aligned) diagonal is `diagonal`: the same rule as core::Mask.
constexpr KeyRange visible_keys(const Shape& s, int64_t diagonal, int32_t length_k) {
  return {s.left < 0 ? 0 : clamp_key(diagonal - s.left, length_k),
          s.right < 0 ? length_k : clamp_key(diagonal + s.right + 1, length_k)};
}
constexpr KeyRange visible_keys(const Shape& s, const QueryBlock& b, int32_t row) {
  return visible_keys(s, int64_t{row} + b.length_k - b.length_q, b.length_k);
}

// Begin and end grow with the row, so the union runs from the first row's begin to the last row's end.
constexpr KeyRange visible_keys(const Shape& s, const QueryBlock& b, int32_t first, int32_t rows) {
  if (first >= b.length_q) return {0, 0};
  return {visible_keys(s, b, first).begin, visible_keys(s, b, b.last_row(first, rows)).end};
}

// Most keys one of these queries sees, of a range they see together: as many unless the window is closed on both sides.
constexpr int32_t most_keys(const Shape& s, KeyRange seen) {
  const int64_t all = int64_t{seen.end} - seen.begin, window = int64_t{s.left} + s.right + 1;
  return static_cast<int32_t>(s.left >= 0 && s.right >= 0 && window < all ? window : all);
}

// Keys every one of these queries sees (may be empty): tiles inside need no mask.
constexpr KeyRange common_keys(const Shape& s, const QueryBlock& b, int32_t first, int32_t rows) {
  if (first >= b.length_q) return {0, 0};
  return {visible_keys(s, b, b.last_row(first, rows)).begin, visible_keys(s, b, first).end};
}

struct TileRange {
  int32_t begin, end;
  constexpr int32_t count() const { return end - begin; }
};

constexpr TileRange tiles_of(KeyRange keys, int32_t tile_keys) {
  if (keys.end <= keys.begin) return {0, 0};
  return {keys.begin / tile_keys, (keys.end + tile_keys - 1) / tile_keys};
}

// Most tiles any block of this shape visits: sizes the cached weights of a resident block.
constexpr int64_t most_tiles(const Shape& s, int32_t tile_keys) {
  int64_t keys = s.seqlen_k;
  if (s.left >= 0 && s.right >= 0) {
    const int64_t span = int64_t{s.left} + s.right + kBlockRows;
    if (span + 2 * tile_keys < keys) keys = span + tile_keys;  // a range of span keys may touch one tile more
  }
  return (keys + tile_keys - 1) / tile_keys;
}

}  // namespace lla::cuda::tensor
