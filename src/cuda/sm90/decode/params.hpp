// Everything the decode kernels are told, by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/problem.hpp"

namespace lla::cuda::sm90::decode {

// Where the keys of a sequence lie. Key j: page table[j / page_size], slot j % page_size; without a table the
// sequence's own stretch of the cache, which then is one page.
struct Cache {
  core::Operand k, v;  // stride[0]: page, or sequence without a table
  const int32_t *lengths, *first_key, *table;
  int64_t table_stride;
  int32_t page_size, pages;
  int32_t max_length;
  int32_t box;   // keys the copy engine takes at a time: 16, or what divides the page size
  bool vectors;  // rows are contiguous and 16-byte aligned: the copy engine takes them
};

struct Params {
  // The cache for the copy engine: (channel, head, slot, page) in boxes of 64 channels and `box` slots.
  alignas(64) CUtensorMap key_map, value_map;
  Cache cache;
  core::Operand q, o, ridge, x;
  const int32_t* cu_q;
  core::RowOutputs info;
  int32_t batch, heads_q, group, seqlen_q, total_q;
  int32_t dim, value_dim;
  int32_t left, right;  // window; -1 unbounded
  float half_scale;     // scale log2(e) / 2: logits in units of sqrt(w)
  int32_t most_rows;    // a sequence with more rows per key head is left to the forward
  int32_t per_dim;      // ridge by dimension
  // The part of the rows this launch works on, counted over all decoded sequences.
  int32_t first_row, row_count;
  // workspace
  float* slots;
  struct RowRecord* records;
  int32_t* live_rows;
};

// Which partial sums make a row: slots [row + first, row + last].
struct RowRecord {
  int32_t first, last;  // blocks
  int32_t batch, head, index;
  int32_t position;  // of the query in q
  int32_t invalid;  // the sequence is not usable: NaN
};

// A slot, in floats: head, vectors (reference key, heaviest key and value), then the products in the order the
// multiplying threads hold them. Of each block of 64 rows: columns of keys, then eight of which the first is the sum.
struct SlotHead {
  int32_t matrix_max[2];  // integer maximum the products of each multiplying warpgroup are relative to
  int32_t omega_max;
  float omega;
  int32_t heaviest_max;
  float heaviest_omega;  // 0: no key
  float key_scale, value_scale;
  int32_t invalid;
};
inline constexpr int kSlotHead = 16;

// Blocks of products: 64 rows (of V'' or K'') times columns of K'' and the roots r.
struct ProductBlock {
  int group;         // multiplying warpgroup
  int first_column;  // of the keys
  int quads;         // of eight columns of keys; one more has the sum
  int from;          // float of the slot, behind the vectors
};
// Values' rows 64 b .. 64 b + 63.
constexpr ProductBlock value_block(int dim, int b) {
  return dim == 64 ? ProductBlock{0, 0, 8, 0} : ProductBlock{b, 0, 16, b == 0 ? 0 : 64 * (136 + 72)};
}
// Keys' rows; the second block leaves out what the first has by symmetry.
constexpr ProductBlock key_block(int dim, int b) {
  return dim == 64 ? ProductBlock{0, 0, 8, 64 * 72}
         : b == 0  ? ProductBlock{1, 0, 16, 64 * (136 + 72 + 136)}
                   : ProductBlock{0, 64, 8, 64 * 136};
}
constexpr int slot_matrix(int dim) { return kSlotHead + 3 * dim; }
constexpr int matrix_floats(int dim) { return dim == 128 ? 64 * (3 * 136 + 72) : 64 * 2 * 72; }
constexpr int slot_floats(int dim) { return slot_matrix(dim) + matrix_floats(dim); }

// With x given a slot has no matrix: head, Σ w v and Σ w e v.
inline constexpr int kGivenHead = 8;
constexpr int given_slot_floats(int dim) { return kGivenHead + 2 * dim; }

}  // namespace lla::cuda::sm90::decode
