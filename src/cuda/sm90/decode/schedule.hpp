// Which part of which row a block works on. Plain functions for host and device: the tests run them on the CPU.
//
// The rows of all decoded sequences, one after the other, each as long as its keys take granules, make one line; every
// block takes the same share of it. A block works on units: the parts of its share that lie in one row. Unit (row,
// block) has partial row + block: walking along the line either the row or the block goes up, so no two units share
// one.
//
// Where rows of a key head make their pass together, a row of the line is a bundle of them: its keys are those that any
// of them sees.
//
// Under options.batch_invariant a row is cut by its own length alone. The line then goes in steps of such a piece, every
// piece is a unit, and its partial is its place along the line.
//
// A sequence that is not usable has its place on the line all the same, with the nearest length it may have: the units
// there have no keys, and the others' parts are what they would be beside a usable one.
#pragma once

#include <cstdint>

#include "cuda/tensor/cache_parts.hpp"

namespace lla::cuda::sm90::decode {

inline constexpr int kGranule = 128;  // keys

// What the walk depends on. Pointers are to the memory of whoever walks.
struct Shape {
  const int32_t *lengths, *first_key, *cu_q;  // the last two may be absent
  int32_t max_length;                         // bound of the lengths
  int32_t batch, heads_q, group, seqlen_q, total_q;
  int32_t left, right;  // window; -1 unbounded
  int32_t most_rows;    // a sequence with more rows per key head is left to the forward
  // The part of the rows this launch works on, counted over all decoded sequences.
  int32_t first_row, row_count;
  int32_t wave;        // blocks that run at a time
  bool invariant;      // rows are cut by their own lengths
  int32_t bundle = 1;  // rows of a key head that make one pass
};

// Tiles begin at multiples of this, so that no copy of several keys leaves its page.
inline constexpr int kAlign = 16;
constexpr int32_t aligned(int32_t key) { return key / kAlign * kAlign; }

struct Keys {
  int32_t begin, end;
};

struct Sequence {
  int32_t start_q, length_q;  // rows: queries of the sequence
  int32_t length;             // keys
  int32_t first;              // visible key
  int32_t rows;               // of the line, decoded here: 0 where the forward takes them
  int32_t granules;           // of each row
  int32_t step, steps;        // granules of a step along the line, and steps of each row
  bool invalid;
};

constexpr int32_t clamp_to(int64_t x, int32_t low, int32_t high) {
  return static_cast<int32_t>(x < low ? low : x > high ? high : x);
}

// Of numbers that are not negative. A GPU has no instruction for it, and its routine for 64 bits is a long one.
constexpr int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

constexpr Keys keys_of(const Shape& p, const Sequence& s, int32_t i) {
  const int64_t diagonal = int64_t{i} + s.length - s.length_q;
  const int32_t begin = p.left < 0 ? s.first : clamp_to(diagonal - p.left, s.first, s.length);
  const int32_t end = p.right < 0 ? s.length : clamp_to(diagonal + p.right + 1, begin, s.length);
  return {begin, end < begin ? begin : end};
}

// Those of the last query; `first`: of the first.
constexpr Keys last_keys_of(const Shape& p, const Sequence& s, const Keys& first) {
  return s.length_q == 1 ? first : keys_of(p, s, s.length_q - 1);
}

// Rows of the line that a key head of a sequence has.
constexpr int32_t bundles_of(const Shape& p, int32_t length_q) {
  return (length_q * p.group + p.bundle - 1) / p.bundle;
}

// Where the rows of the next sequence begin, whatever cu_q holds (core::rows_before). Pass it on from b to b + 1.
constexpr int32_t rows_claimed(const Shape& p, int32_t claimed, int32_t b) {
  return p.cu_q && p.cu_q[b + 1] > claimed ? p.cu_q[b + 1] : claimed;
}

// Granules of a piece of a row where rows are cut by their own lengths: 2,048 keys, 4,096 of rows of more than 8,192. A
// piece costs a batch of many rows some 25 us of a block and a partial; a row alone would like more of them. A row has
// kMostPieces at most.
inline constexpr int32_t kShortPiece = 16, kLongPiece = 32, kMostShortRow = 64, kMostPieces = 256;
constexpr int32_t piece_granules(int32_t granules) {
  if (granules <= kMostShortRow) return kShortPiece;
  int32_t piece = kLongPiece;
  while (piece < (granules + kMostPieces - 1) / kMostPieces) piece *= 2;
  return piece;
}
// The most pieces of a row of up to so many granules.
constexpr int32_t most_pieces(int32_t granules) {
  const int32_t own = (granules + piece_granules(granules) - 1) / piece_granules(granules);
  const int32_t shorter = granules > kLongPiece * kMostPieces ? kMostPieces
                          : granules > kMostShortRow          ? kMostShortRow / kShortPiece
                                                              : 0;
  return own > shorter ? own : shorter;
}

// A sequence's place on the line: its rows and the steps of each.
constexpr void take_place(const Shape& p, Sequence& s) {
  if (s.length_q == 0 || !decodes(s.length_q, p.group, p.most_rows)) return;
  s.rows = bundles_of(p, s.length_q) * (p.heads_q / p.group);
  const Keys a = keys_of(p, s, 0), z = last_keys_of(p, s, a);
  const int32_t keys_a = a.end - aligned(a.begin), keys_z = z.end - aligned(z.begin);
  const int32_t all = z.end - aligned(a.begin);  // that any row sees
  int32_t most = keys_a > keys_z ? keys_a : keys_z;
  if (p.bundle > 1) {
    most = all;
  } else if (s.length_q > 1 && p.left >= 0 && p.right >= 0) {  // rows in the middle may see more than both ends
    most = clamp_to(int64_t{p.left} + p.right + 1 + kAlign, most, all);
  }
  s.granules = most > 0 ? (most + kGranule - 1) / kGranule : 1;
  s.step = p.invariant ? piece_granules(s.granules) : 1;
  s.steps = (s.granules + s.step - 1) / s.step;
}

// Sequence b, as core::sequence has it; `claimed`: rows_claimed of those before.
constexpr Sequence sequence_at(const Shape& p, int32_t b, int32_t claimed) {
  Sequence s{};
  s.length_q = p.seqlen_q;
  s.length = p.lengths[b];
  const int32_t first = p.first_key ? p.first_key[b] : 0;
  s.invalid = s.length < 0 || s.length > p.max_length || first < 0;
  if (p.cu_q) {
    s.start_q = claimed < p.total_q ? claimed : p.total_q;
    s.length_q = clamp_to(p.cu_q[b + 1], s.start_q, p.total_q) - s.start_q;
    s.invalid =
        s.invalid || p.cu_q[b] != s.start_q || p.cu_q[b + 1] != s.start_q + s.length_q || s.length_q > p.seqlen_q;
  }
  s.length = clamp_to(s.length, 0, p.max_length);
  s.first = clamp_to(first, 0, s.length);
  take_place(p, s);
  if (s.invalid) s.length = s.first = 0;  // nothing of it is read
  return s;
}

// Row r of a key head: query head and query.
struct RowPlace {
  int32_t head, index;
};
constexpr RowPlace row_place(int32_t group, int32_t length_q, int32_t kv_head, int32_t r) {
  if (length_q == 1) return {kv_head * group + r, 0};  // divisions take a while
  return {kv_head * group + r / length_q, r % length_q};
}

// Rows of a sequence that are decoded.
constexpr int32_t decoded_rows(const Shape& p, const Sequence& s) { return s.rows > 0 ? s.length_q * p.heads_q : 0; }

// Rows of the line that every sequence has where queries are dense.
constexpr int32_t rows_of_each(const Shape& p) {
  if (p.seqlen_q == 0 || !decodes(p.seqlen_q, p.group, p.most_rows)) return 0;
  return bundles_of(p, p.seqlen_q) * (p.heads_q / p.group);
}
// The sequences that have rows of the launch, where all have equally many: nobody has to look at those before.
struct SequenceRange {
  int32_t begin, end;
};
constexpr SequenceRange sequences_of(const Shape& p, int32_t each) {
  if (each == 0 || p.row_count == 0) return {0, 0};
  const int64_t last = quotient(int64_t{p.first_row} + p.row_count - 1, each);
  return {clamp_to(quotient(p.first_row, each), 0, p.batch), clamp_to(last + 1, 0, p.batch)};
}

// Of a launch's rows [first_row, first_row + row_count), those of a sequence whose rows begin at `before`.
struct RowShare {
  int32_t skip, count;
};
constexpr RowShare row_share(const Shape& p, int32_t before, int32_t rows) {
  const int64_t low = int64_t{p.first_row} - before, high = low + p.row_count;
  const int32_t begin = clamp_to(low, 0, rows), end = clamp_to(high, 0, rows);
  return {begin, end - begin};
}

// Blocks that get a share, each at least one granule: a row's parts are then those of consecutive blocks. Where rows
// are equally long, a count that divides theirs, or a multiple of it, spares blocks the end of one row and the
// beginning of the next. A unit costs as much as some hundred keys: worth four granules more for every block, or a 24th
// of its share, as blocks that go along their rows in step read the heads of a token at the same time.
constexpr int working_blocks(int64_t granules, int64_t rows, int blocks) {
  if (granules < blocks) return static_cast<int>(granules);
  if (rows == 0) return blocks;
  const int64_t each = quotient(rows + blocks - 1, blocks), share = quotient(granules, blocks);
  const int64_t even = rows < blocks ? quotient(blocks, rows) * rows : quotient(rows + each - 1, each);
  return quotient(granules, even) <= share + (share > 4 * 24 ? share / 24 : 4) ? static_cast<int>(even) : blocks;
}
// Blocks for the live rows of a launch: one that goes along its share for each multiprocessor. Rows that share keys run
// at the same time, each in a block of its own, so that the keys come from memory once and from L2 for the others.
constexpr int blocks_for(const Shape& p, int64_t steps, int64_t live, bool sharing) {
  const int64_t waves = sharing && live > p.wave ? (live + p.wave - 1) / p.wave : 1;
  if (p.invariant) return static_cast<int>(steps < waves * p.wave ? steps : waves * p.wave);
  return working_blocks(steps, live, static_cast<int>(waves * p.wave));
}
// As the host knows it, who has launched no more blocks: a sequence may claim more rows than it may have.
constexpr bool shares_keys(const Shape& p, const Sequence& s) {
  const int32_t rows = s.length_q < p.seqlen_q ? s.length_q : p.seqlen_q;
  return s.rows > 0 && int64_t{rows} * p.group > p.bundle;
}
// Blocks of such a cluster.
constexpr int solving_cluster(int dim) { return dim / 16; }
// Rows of a launch that are put together in clusters: no more than run in two rounds. A cluster wants its multiprocessors
// side by side, so that a tenth of them may stay idle.
constexpr int32_t few_rows(int multiprocessors, int dim) {
  const int32_t quarter = multiprocessors / 4, two_rounds = 2 * (multiprocessors * 9 / 10 / solving_cluster(dim));
  return quarter < two_rounds ? quarter : two_rounds;
}
constexpr int64_t share_begin(int64_t steps, int block, int blocks) { return quotient(steps * block, blocks); }

// What a block has yet to do.
struct Walk {
  int32_t batch, row;  // next unit: row of the sequence
  int32_t step;        // its first
  int32_t before;      // decoded rows of the sequences before
  int32_t claimed;     // rows_claimed of them
  int32_t numbered;    // rows of those before, bundles counted as the rows they are
  int64_t left;        // steps; 0: nothing
  int32_t partial;     // the block, or under batch_invariant the next unit's place along the line
};

// A part of one row, or of a bundle.
struct Unit {
  int32_t batch, head, index;  // query head, query of the sequence: the first of a bundle
  int32_t kv_head;
  int32_t rows;         // of the bundle
  int32_t row_of_head;  // the first one's number among those of its key head
  int32_t position;     // of the query in q
  int32_t local;        // row of this launch
  int32_t number;       // of the (first) row among all decoded ones, whatever the launch
  int32_t partial;      // where its sums go
  Keys row, keys;       // all of the row, and those of this unit
  Keys sequence;        // what any row of the sequence sees
  Sequence of;
  int32_t start;     // of the part's first tile, at or before its first key
  bool first, last;  // part of the row
  bool invalid;      // the sequence is not usable
};

// Row i of a unit's.
struct UnitRow {
  int32_t head, position;
  Keys keys;
};
constexpr UnitRow row_of(const Shape& p, const Unit& u, int32_t i) {
  const RowPlace place = row_place(p.group, u.of.length_q, u.kv_head, u.row_of_head + i);
  return {place.head, u.of.start_q + place.index, keys_of(p, u.of, place.index)};
}

// The next unit; moves on. Only where something is left.
constexpr Unit take(const Shape& p, Walk& walk) {
  Sequence s = sequence_at(p, walk.batch, walk.claimed);
  RowShare share = row_share(p, walk.before, s.rows);
  while (walk.row >= share.skip + share.count) {  // on to the next sequence with rows in this launch
    walk.before += s.rows;
    walk.numbered += decoded_rows(p, s);
    walk.claimed = rows_claimed(p, walk.claimed, walk.batch);
    ++walk.batch;
    s = sequence_at(p, walk.batch, walk.claimed);
    share = row_share(p, walk.before, s.rows);
    walk.row = share.skip;
    walk.step = 0;
  }
  const int32_t bundles = bundles_of(p, s.length_q), rows = s.length_q * p.group;
  Unit u{};
  u.of = s;
  u.kv_head = bundles == 1 ? walk.row : walk.row / bundles;
  u.row_of_head = (walk.row - u.kv_head * bundles) * p.bundle;
  u.rows = rows - u.row_of_head < p.bundle ? rows - u.row_of_head : p.bundle;
  const RowPlace place = row_place(p.group, s.length_q, u.kv_head, u.row_of_head);
  const RowPlace last = row_place(p.group, s.length_q, u.kv_head, u.row_of_head + u.rows - 1);
  u.batch = walk.batch, u.head = place.head, u.index = place.index;
  u.position = s.start_q + place.index;
  u.local = walk.before + walk.row - p.first_row;
  u.number = walk.numbered + u.kv_head * rows + u.row_of_head;
  const Keys first_keys = keys_of(p, s, 0);
  u.row = u.sequence = {first_keys.begin, last_keys_of(p, s, first_keys).end};
  if (s.length_q > 1 && place.head == last.head) {  // otherwise all queries may be among them
    u.row = {keys_of(p, s, place.index).begin, keys_of(p, s, last.index).end};
  }
  u.invalid = s.invalid;
  const int32_t remaining = s.steps - walk.step;
  const int32_t count = p.invariant ? 1 : walk.left < remaining ? static_cast<int32_t>(walk.left) : remaining;
  u.first = walk.step == 0;
  u.last = walk.step + count == s.steps;
  u.start = aligned(u.row.begin) + walk.step * s.step * kGranule;
  u.keys = {clamp_to(u.start, u.row.begin, u.row.end),
            clamp_to(int64_t{u.start} + int64_t{count} * s.step * kGranule, u.row.begin, u.row.end)};
  u.partial = p.invariant ? walk.partial++ : u.local + walk.partial;
  walk.left -= count;
  walk.step += count;
  if (walk.step == s.steps) ++walk.row, walk.step = 0;
  return u;
}

}  // namespace lla::cuda::sm90::decode
