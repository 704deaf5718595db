// Everything the decode kernels are told, by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/sm90/decode/partials.hpp"
#include "cuda/sm90/decode/schedule.hpp"

namespace lla::cuda::sm90::decode {

// Where the keys of a sequence lie. Key j: page table[j / page_size], slot j % page_size; without a table the
// sequence's own stretch of the cache, which then is one page.
struct Cache {
  core::Operand k, v;  // stride[0]: page, or sequence without a table
  const int32_t* table;
  int64_t table_stride;
  int32_t page_size, pages;
  int32_t box;   // keys the copy engine takes at a time: 16, or what divides the page size
  bool vectors;  // rows are contiguous and 16-byte aligned: the copy engine takes them
};

struct Params : Shape {
  // The cache for the copy engine: (channel, head, slot, page) in boxes of 64 channels and `box` slots.
  CUtensorMap key_map, value_map;
  Cache cache;
  core::Operand q, o, ridge, x;
  core::RowOutputs info;
  int32_t dim, value_dim;
  int32_t multiprocessors;
  // Beside prompts the host knows no useful bound of the decoded rows. What otherwise follows from it follows from the
  // rows there are, so that the prompts change no bit of the decoders.
  bool decide_by_live_rows;
  bool eliminate;  // rows are never solved by steps
  // Rows may share keys, which L2 then keeps. Otherwise keys go first: partials, to which sums are added again and again,
  // would be pushed out by them.
  bool keys_are_shared;
  // Where all caches are up to so long (0: never), one kernel does everything and the others nothing.
  int32_t short_keys;
  float half_scale;  // scale log2(e) / 2: logits in units of sqrt(w)
  // workspace
  // Of every decoded row, where a first pass has solved for it (otherwise x): x, and the size of the terms of k.x.
  float *solved_x, *solved_terms;
  float* partials;
  RowRecord* records;
  int32_t* live_rows;
};

}  // namespace lla::cuda::sm90::decode
