// What one block leaves behind of one row: partial sums, in the workspace. And how much workspace that takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace lla::cuda::sm90::decode {

// Which partial sums make a row: partials [row + first, row + last].
struct RowRecord {
  int32_t first, last;
  int32_t batch, head, index;
  int32_t position;  // of the query in q
  int32_t invalid;   // the sequence is not usable: NaN
  // Of a bundle: how many rows, the queries of the sequence, and the first one's number among those of its key head.
  int32_t rows, length_q, row_of_head;
  int32_t number;  // of the (first) row among all decoded ones
};

// Of what is too large for its scale, which.
enum TooLarge : int32_t { kKeysTooLarge = 1, kValuesTooLarge = 2 };
inline constexpr int kTooLargeBits = 2;

// A partial, in floats: head, vectors (reference key, heaviest key and value), then the products in the order the
// consumers hold them. Of each block of 64 rows: columns of keys, then eight of which the first is the sum.
struct PartialHead {
  int32_t matrix_max[2];  // integer maximum the products of each consumer warpgroup are relative to
  int32_t omega_max;
  float omega;
  int32_t heaviest_max;
  float heaviest_omega;  // 0: no key
  float key_scale, value_scale;
  int32_t invalid;
  // Too large for its scales: sums of each consumer warpgroup (not finite), the heaviest key (TooLarge; above
  // kTooLargeBits how often the keys' scale has been made smaller already).
  int32_t again[3];
};
inline constexpr int kPartialHead = 16;

// Blocks of products: 64 rows (of V'' or K'') times columns of K'' and the roots r.
struct ProductTile {
  int warpgroup;     // consumer warpgroup
  int first_column;  // of the keys
  int quads;         // of eight columns of keys; one more has the sum
  int from;          // float of the partial, behind the vectors
};
// Values' rows 64 b .. 64 b + 63.
constexpr ProductTile value_tile(int dim, int b) {
  return dim == 64 ? ProductTile{0, 0, 8, 0} : ProductTile{b, 0, 16, b == 0 ? 0 : 64 * (136 + 72)};
}
// Keys' rows; the second block leaves out what the first has by symmetry. Without products of values they come first.
constexpr ProductTile key_tile(int dim, int b, bool values = true) {
  if (!values)
    return dim == 64 ? ProductTile{0, 0, 8, 0} : b == 0 ? ProductTile{0, 0, 16, 0} : ProductTile{1, 64, 8, 64 * 136};
  return dim == 64 ? ProductTile{0, 0, 8, 64 * 72}
         : b == 0  ? ProductTile{0, 0, 16, 64 * (136 + 72 + 136)}
                   : ProductTile{1, 64, 8, 64 * 136};
}
constexpr int partial_matrix(int dim) { return kPartialHead + 3 * dim; }
constexpr int matrix_floats(int dim, bool values = true) {
  if (!values) return dim == 128 ? 64 * (136 + 72) : 64 * 72;
  return dim == 128 ? 64 * (3 * 136 + 72) : 64 * 2 * 72;
}
constexpr int partial_floats(int dim, bool values = true) { return partial_matrix(dim) + matrix_floats(dim, values); }

// With x given a partial has no matrix: head, Σ w v and Σ w e v. Rows of a key head that make one pass together, a
// bundle, have theirs side by side.
inline constexpr int kBundleRows = 8;
inline constexpr int kGivenXHead = 8;
constexpr int given_x_row_floats(int dim) { return kGivenXHead + 2 * dim; }

// Rows of a key head whose products of keys are formed in one pass: as many as there are registers for.
constexpr int moments_bundle(int dim) { return dim == 128 ? 2 : 4; }
inline constexpr int kMomentsKeys = 64;  // of a tile of that pass

// What a launch is: rows that are solved in one pass; rows that have their x, each on its own or in bundles; the first
// of two passes, which solves for the x of rows that share keys.
enum class Form { solved, given_x, bundles, moments };
constexpr int bundle_of(Form form, int dim) {
  return form == Form::bundles ? kBundleRows : form == Form::moments ? moments_bundle(dim) : 1;
}
constexpr bool leaves_matrices(Form form) { return form == Form::solved || form == Form::moments; }
constexpr int64_t partial_bytes(Form form, int dim) {
  const int floats = leaves_matrices(form) ? partial_floats(dim, form == Form::solved) : given_x_row_floats(dim);
  return int64_t{4} * bundle_of(form, dim) * floats;
}

// Where things lie in the workspace. Independent of the cache's capacity: a partial for every row of a launch and every
// block, or under batch_invariant for every piece of every row. Where there are more rows, they go in several launches.
//
// A launch that may have rows that share keys has a block for every row, wave after wave (blocks_for in schedule.hpp
// says how many of them work).
inline constexpr int kMostBlocks = 512;  // of a launch that solves: a row may have a part in each

// Blocks of a launch that run at a time. Of a bundle's kernel two share a multiprocessor: one begins or ends a unit
// while the other streams.
inline constexpr int kBundleResident = 2;
constexpr int wave_of(Form form, int multiprocessors) {
  return form == Form::bundles ? kBundleResident * multiprocessors : multiprocessors;
}

// Rows that a multiprocessor solves at a time.
constexpr int solves_at_once(int dim) { return dim == 128 ? 2 : 3; }

struct Layout {
  int32_t rows_at_once = 0;
  int32_t blocks = 0;                            // of a launch
  int64_t records = 0, live_rows = 0, size = 0;  // partials come first

  // `sharing`: whether rows may share keys. The rows of a launch do not depend on it, so that it changes no bits of
  // decoders with prompts beside them. `alone`: no row shares keys, and nothing can be beside them.
  // `pieces`: of a row, at most, where rows are cut by their own lengths; else 0.
  Layout(int64_t rows, int dim, Form form, int multiprocessors, bool sharing, int64_t pieces = 0, bool alone = false) {
    const int64_t partial = partial_bytes(form, dim), fit = kMostBytes / partial;
    const int32_t wave = wave_of(form, multiprocessors);
    const int64_t most =
        pieces > 0 ? most_cut(2 * kMostBytes / (partial * pieces), pieces, multiprocessors)
        : alone
            ? equal_shares(rows, fit - wave, form == Form::solved ? solves_at_once(dim) * multiprocessors : wave)
            : whole_waves(leaves_matrices(form) ? std::min<int64_t>(fit / 2, kMostBlocks) : fit / 2, multiprocessors);
    rows_at_once = static_cast<int32_t>(std::max<int64_t>(1, std::min(rows, most)));
    blocks = sharing ? (rows_at_once + wave - 1) / wave * wave : wave;
    const int64_t partials = pieces > 0 ? rows_at_once * pieces : int64_t{rows_at_once} + blocks;
    records = (partial * partials + 255) / 256 * 256;
    live_rows = records + int64_t{rows_at_once} * int64_t{sizeof(RowRecord)};
    size = live_rows + 16;
  }

 private:
  static constexpr int64_t kMostBytes = int64_t{64} << 20;

  static int64_t whole_waves(int64_t room, int wave) { return std::max<int64_t>(1, room / wave) * wave; }
  // A launch waits for the solves of the one before: whole waves of those, as few launches as there is room for, and none
  // with a few rows only.
  static int64_t equal_shares(int64_t rows, int64_t room, int wave) {
    const int64_t most = whole_waves(room, wave), launches = (rows + most - 1) / most;
    return launches <= 1 ? most : whole_waves((rows + launches - 1) / launches + wave - 1, wave);
  }

  // Rows of that many pieces: at most `room`, and such that every multiprocessor has equally many pieces.
  static int64_t most_cut(int64_t room, int64_t pieces, int multiprocessors) {
    const int64_t even = std::max<int64_t>(1, multiprocessors / std::gcd<int64_t>(pieces, multiprocessors));
    return room >= even ? room / even * even : room;
  }
};

}  // namespace lla::cuda::sm90::decode
