// What both roles of a forward block derive from a work item.
#pragma once

#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/params.hpp"
#include "cuda/sm90/scale.hpp"
#include "cuda/sm90/schedule.hpp"

namespace lla::cuda::sm90 {

struct ForwardBlock {
  Block block;
  TileRange tiles;     // of all its rows
  int32_t head_index;  // of the key head in HeadStatistics and the copies
  int64_t key_row;     // of the sequence's first key in the copies

  __device__ __forceinline__ ForwardBlock(const ForwardParams& p, int64_t item, int tile_keys, int rows = kBlockRows)
      : block(block_of_item(p.shape, p.cu_q, p.cu_k, item, rows)) {
    tiles = tiles_of(visible_keys(p.shape, block, block.first_row, rows), tile_keys);
    const int32_t kv_head = block.head / p.shape.group;
    head_index = p.shape.spans == kPackedSpans ? kv_head : block.batch * p.heads_kv + kv_head;
    key_row = p.shape.spans != kNoSpans ? int64_t{kv_head} * p.shape.total_k + block.start_k
                                        : int64_t{head_index} * p.shape.seqlen_k;
  }
};

// Powers of two the pre-pass scaled a head by, and the bound of its scaled keys' norms.
struct HeadScales {
  float key, value, key_norm;
  bool shifted;  // the keys' common part was taken away

  __device__ __forceinline__ HeadScales(const ForwardParams& p, int head_index) {
    const uint4 head = *reinterpret_cast<const uint4*>(p.heads + head_index);
    key = power_of_two_scale(__uint_as_float(head.x));
    value = power_of_two_scale(__uint_as_float(head.y));
    key_norm = fmaxf(__uint_as_float(head.z), 1.0f);  // also where all keys are zero: scales are made of it
    shifted = head.w & kShifted;
  }
};

// The two rows a thread works on; one that does not exist stands for the last.
struct OwnRows {
  Pair<int> row;
  Pair<bool> exists;

  __device__ __forceinline__ OwnRows(const Block& block, int first_row, const Lane& lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int wanted = first_row + lane.row + 8 * r;
      exists[r] = wanted < block.length_q;
      row[r] = min(wanted, block.length_q - 1);
    }
  }
};

// The marks of the keys and values that a thread's rows see, all or-ed. Looked up only where the head has any.
__device__ __forceinline__ void marks_seen(Pair<uint32_t>& marks, const ForwardParams& p, int head_index,
                                           int64_t key_row, const Pair<KeyRange>& keys, const Lane& lane) {
  marks[0] = marks[1] = kOrdinary;
  if ((p.heads[head_index].marked & ~kShifted) == 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t seen = 0;
#pragma unroll 1
    for (int key = keys[r].begin + lane.column / 2; key < keys[r].end; key += 4) {
      seen |= p.key_marks[key_row + key] | p.value_marks[key_row + key];
    }
    seen |= __shfl_xor_sync(0xffffffffu, seen, 1);
    marks[r] = seen | __shfl_xor_sync(0xffffffffu, seen, 2);
  }
}

// Of the saved and info outputs: core::row_index.
__device__ __forceinline__ int64_t row_index(const ForwardParams& p, const Block& block, int row) {
  return p.shape.packed ? int64_t{block.head} * p.shape.total_q + block.start_q + row
                        : (int64_t{block.batch} * p.shape.heads_q + block.head) * p.shape.seqlen_q + row;
}

}  // namespace lla::cuda::sm90
