// What both roles of a forward block derive from a work item.
#pragma once

#include "cuda/tensor/fragment.cuh"
#include "cuda/tensor/params.hpp"
#include "cuda/tensor/scale.hpp"
#include "cuda/tensor/schedule.hpp"

namespace lla::cuda::tensor {

struct ForwardItem {
  QueryBlock block;
  TileRange tiles;     // of all its rows
  int32_t copy_index;  // of the key head in HeadStatistics and the copies
  int64_t key_row;     // of the sequence's first key in the copies

  __device__ __forceinline__ ForwardItem(const ForwardParams& params, int64_t item, int tile_keys,
                                         int rows = kBlockRows)
      : block(block_of_item(params.shape, params.cu_q, params.cu_k, item, rows)) {
    tiles = tiles_of(visible_keys(params.shape, block, block.first_row, rows), tile_keys);
    const int32_t kv_head = block.head / params.shape.group;
    copy_index = kv_copy(params.shape, params.heads_kv, block.batch, kv_head);
    key_row = first_key_row(params.shape, copy_index, kv_head, block.start_k);
  }
};

// Powers of two the pre-pass scaled a head by, and the bound of its scaled keys' norms.
struct HeadScales {
  float key, value, key_norm;
  bool shifted;  // the keys' common part was taken away
  bool marked;   // it has a key or value that is not kOrdinary

  __device__ __forceinline__ HeadScales(const ForwardParams& params, int copy_index) {
    const uint4 head = *reinterpret_cast<const uint4*>(params.heads + copy_index);
    key = power_of_two_scale(__uint_as_float(head.x));
    value = power_of_two_scale(__uint_as_float(head.y));
    key_norm = fmaxf(__uint_as_float(head.z), 1.0f);  // also where all keys are zero: scales are made of it
    shifted = head.w & kShifted;
    marked = head.w & ~kShifted;
  }
};

// The two rows a thread works on; one that does not exist stands for the last.
struct OwnRows {
  Pair<int> row;
  Pair<bool> exists;

  __device__ __forceinline__ OwnRows(const QueryBlock& block, int first_row, const Lane& lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int wanted = first_row + lane.row + 8 * r;
      exists[r] = wanted < block.length_q;
      row[r] = min(wanted, block.length_q - 1);
    }
  }
};

// The marks of the keys and values that a thread's rows see, all or-ed. Looked up only where the head has any.
__device__ __forceinline__ void marks_seen(Pair<uint32_t>& marks, const ForwardParams& params, const HeadScales& head,
                                           int64_t key_row, const Pair<KeyRange>& keys, const Lane& lane) {
  marks[0] = marks[1] = kOrdinary;
  if (!head.marked) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t seen = 0;
#pragma unroll 1
    for (int key = keys[r].begin + lane.column / 2; key < keys[r].end; key += 4) {
      seen |= params.key_marks[key_row + key] | params.value_marks[key_row + key];
    }
    seen |= __shfl_xor_sync(0xffffffffu, seen, 1);
    marks[r] = seen | __shfl_xor_sync(0xffffffffu, seen, 2);
  }
}

// Of the saved and info outputs: core::row_index.
__device__ __forceinline__ int64_t row_index(const ForwardParams& params, const QueryBlock& block, int row) {
  return query_row(params.shape, block.batch, block.head, block.start_q, row);
}

}  // namespace lla::cuda::tensor
