// A block's way along the line of rows (schedule.hpp).
#pragma once

#include "cuda/sm90/decode/params.hpp"

namespace lla::cuda::sm90::decode {

__device__ __forceinline__ int64_t warp_prefix(int64_t x, int lane) {  // inclusive
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int64_t below = __shfl_up_sync(0xffffffffu, x, by);
    x += lane >= by ? below : 0;
  }
  return x;
}

__device__ __forceinline__ int32_t warp_prefix_max(int32_t x, int lane) {  // inclusive
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, x, by);
    if (lane >= by) x = max(x, below);
  }
  return x;
}

// Sequences [first, first + 32), one a lane; `claimed` moves on.
__device__ __forceinline__ Sequence sequence_of_lane(const Shape& p, int first, int lane, int32_t& claimed,
                                                     int32_t& mine) {
  const bool there = first + lane < p.batch;
  const int32_t upto = warp_prefix_max(there ? rows_claimed(p, claimed, first + lane) : claimed, lane);
  const int32_t below = __shfl_up_sync(0xffffffffu, upto, 1);
  mine = lane == 0 ? claimed : below;
  claimed = __shfl_sync(0xffffffffu, upto, 31);
  return there ? sequence_at(p, first + lane, mine) : Sequence{};
}

// By a whole warp.
__device__ inline Walk find_start(const Params& p, int block) {
  const int lane = threadIdx.x % 32;
  int64_t total = 0, rows = 0;
  int32_t claimed = 0, mine_claimed = 0;
  bool sharing = false;
  for (int first = 0; first < p.batch; first += 32) {
    const Sequence s = sequence_of_lane(p, first, lane, claimed, mine_claimed);
    sharing |= __any_sync(0xffffffffu, shares_keys(p, s));
    const int64_t upto = warp_prefix(s.rows, lane);
    const RowShare share = row_share(p, static_cast<int32_t>(rows + upto - s.rows), s.rows);
    total += __shfl_sync(0xffffffffu, warp_prefix(int64_t{share.count} * s.steps, lane), 31);
    rows += __shfl_sync(0xffffffffu, upto, 31);
  }
  const int32_t live = clamp_to(rows - p.first_row, 0, p.row_count);
  if (block == 0 && lane == 0) *p.live_rows = live;
  Walk walk{};
  const int blocks = blocks_for(p, total, live, sharing);
  if (block >= blocks) return walk;
  const int64_t begin = share_begin(total, block, blocks), end = share_begin(total, block + 1, blocks);
  walk.left = end - begin;
  walk.partial = p.invariant ? static_cast<int32_t>(begin) : block;
  if (walk.left == 0) return walk;
  int64_t steps = 0, numbered = 0;
  rows = 0, claimed = 0;
  for (int first = 0; first < p.batch; first += 32) {
    const Sequence s = sequence_of_lane(p, first, lane, claimed, mine_claimed);
    const int64_t upto = warp_prefix(s.rows, lane);
    const int32_t before = static_cast<int32_t>(rows + upto - s.rows);
    const RowShare share = row_share(p, before, s.rows);
    const int64_t length = int64_t{share.count} * s.steps;
    const int64_t sum = warp_prefix(length, lane);
    const int64_t offset = begin - (steps + sum - length);
    const bool mine = offset >= 0 && offset < length;
    const int64_t rows_upto = warp_prefix(decoded_rows(p, s), lane);
    const unsigned who = __ballot_sync(0xffffffffu, mine);
    if (who != 0) {
      const int source = __ffs(who) - 1;
      const int32_t row = mine ? share.skip + static_cast<int32_t>(offset / s.steps) : 0;
      const int32_t step = mine ? static_cast<int32_t>(offset % s.steps) : 0;
      walk.batch = first + source;
      walk.row = __shfl_sync(0xffffffffu, row, source);
      walk.step = __shfl_sync(0xffffffffu, step, source);
      walk.before = __shfl_sync(0xffffffffu, before, source);
      walk.claimed = __shfl_sync(0xffffffffu, mine_claimed, source);
      const int64_t number = numbered + rows_upto - decoded_rows(p, s);
      walk.numbered = __shfl_sync(0xffffffffu, static_cast<int32_t>(number), source);
      return walk;
    }
    steps += __shfl_sync(0xffffffffu, sum, 31);
    rows += __shfl_sync(0xffffffffu, upto, 31);
    numbered += __shfl_sync(0xffffffffu, rows_upto, 31);
  }
  walk.left = 0;
  return walk;
}

// Which are a row's first and last part, and what row it is.
__device__ __forceinline__ void record_row(const Params& p, const Unit& u) {
  RowRecord& record = p.records[u.local];
  if (u.first) {
    record.first = u.partial - u.local;
    record.batch = u.batch, record.head = u.head, record.index = u.index, record.position = u.position;
    record.invalid = u.invalid;
    record.rows = u.rows, record.length_q = u.of.length_q, record.row_of_head = u.row_of_head;
    record.number = u.number;
  }
  if (u.last) record.last = u.partial - u.local;
}

__device__ __forceinline__ int64_t row_offset(const core::Operand& t, int batch, int position, int head) {
  return batch * t.stride[0] + position * t.stride[1] + head * t.stride[2];
}

// The record of row i of a bundle's.
__device__ __forceinline__ RowRecord row_of(const Params& p, const RowRecord& bundle, int i) {
  const RowPlace place = row_place(p.group, bundle.length_q, bundle.head / p.group, bundle.row_of_head + i);
  RowRecord row = bundle;
  row.head = place.head, row.index = place.index;
  row.position = bundle.position - bundle.index + place.index;
  row.number += i;
  return row;
}

__device__ __forceinline__ void report_row(const Params& p, const RowRecord& r, int32_t status) {
  const int64_t row = p.cu_q ? r.head * int64_t{p.total_q} + r.position
                             : (int64_t{r.batch} * p.heads_q + r.head) * p.seqlen_q + r.index;
  if (p.info.iterations) p.info.iterations[row] = -1;
  if (p.info.residual) p.info.residual[row] = -1;
  if (p.info.status) p.info.status[row] = status;
}

}  // namespace lla::cuda::sm90::decode
