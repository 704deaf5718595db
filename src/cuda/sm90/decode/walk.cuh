// A block's way along the line of rows (schedule.hpp).
#pragma once

#include "cuda/sm90/decode/params.hpp"

namespace lla::cuda::sm90::decode {

template <class T>
__device__ __forceinline__ T warp_prefix(T x, int lane) {  // inclusive
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const T below = __shfl_up_sync(0xffffffffu, x, by);
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

// Whether all caches of a call are short (short.cuh). By a whole warp.
__device__ __forceinline__ bool caches_are_short(const Params& p) {
  bool is_long = false;
  for (int b = threadIdx.x % 32; b < p.batch; b += 32)
    is_long |= clamp_to(p.lengths[b], 0, p.max_length) > p.short_keys;
  return !__any_sync(0xffffffffu, is_long);
}

// What find_start looks at: 32 sequences, one a lane, and what comes before each of them.
struct SequenceOfLane {
  Sequence sequence;
  RowShare share;
  int32_t before, claimed, number;  // rows of the line, rows claimed, rows that are decoded
  int64_t length, upto;             // steps along the line: of the launch's rows, and with those of the lanes before
};

// Rows of the sequences before some sequence.
struct RowsBefore {
  int32_t rows, claimed, numbered;
};

// Moves on. kRagged: sequences have different numbers of rows.
template <bool kRagged>
__device__ __forceinline__ SequenceOfLane look_at(const Params& p, int first, int32_t each, RowsBefore& past) {
  const int lane = threadIdx.x % 32, b = first + lane;
  const bool there = b < p.batch;
  SequenceOfLane at;
  if constexpr (kRagged) {
    const int32_t claimed = warp_prefix_max(there ? rows_claimed(p, past.claimed, b) : past.claimed, lane);
    const int32_t below = __shfl_up_sync(0xffffffffu, claimed, 1);
    at.claimed = lane == 0 ? past.claimed : below;
    at.sequence = there ? sequence_at(p, b, at.claimed) : Sequence{};
    const int32_t rows = warp_prefix(at.sequence.rows, lane);
    const int32_t decoded = warp_prefix(decoded_rows(p, at.sequence), lane);
    at.before = past.rows + rows - at.sequence.rows;
    at.number = past.numbered + decoded - decoded_rows(p, at.sequence);
    past = {past.rows + __shfl_sync(0xffffffffu, rows, 31), __shfl_sync(0xffffffffu, claimed, 31),
            past.numbered + __shfl_sync(0xffffffffu, decoded, 31)};
  } else {
    at.claimed = 0;
    at.sequence = there ? sequence_at(p, b, 0) : Sequence{};
    at.before = each * b, at.number = each > 0 ? p.seqlen_q * p.heads_q * b : 0;
  }
  at.share = row_share(p, at.before, at.sequence.rows);
  at.length = int64_t{at.share.count} * at.sequence.steps;
  at.upto = warp_prefix(at.length, lane);
  return at;
}

template <bool kRagged>
__device__ __forceinline__ Walk find_start_in(const Params& p, int block) {
  const int lane = threadIdx.x % 32;
  const int32_t each = kRagged ? 0 : rows_of_each(p);
  const SequenceRange range = kRagged ? SequenceRange{0, p.batch} : sequences_of(p, each);
  RowsBefore past{};
  int64_t total = 0;
  bool sharing = false;
  SequenceOfLane at{};
#pragma unroll 1
  for (int first = range.begin; first < range.end; first += 32) {
    at = look_at<kRagged>(p, first, each, past);
    sharing |= __any_sync(0xffffffffu, shares_keys(p, at.sequence));
    total += __shfl_sync(0xffffffffu, at.upto, 31);
  }
  const int32_t live = clamp_to(int64_t{kRagged ? past.rows : each * p.batch} - p.first_row, 0, p.row_count);
  if (block == 0 && lane == 0) *p.live_rows = live;
  Walk walk{};
  const int blocks = blocks_for(p, total, live, sharing);
  if (block >= blocks) return walk;
  const int64_t begin = share_begin(total, block, blocks), end = share_begin(total, block + 1, blocks);
  walk.left = end - begin;
  walk.partial = p.invariant ? static_cast<int32_t>(begin) : block;
  if (walk.left == 0) return walk;
  int64_t steps = 0;
  past = {};
#pragma unroll 1
  for (int first = range.begin; first < range.end; first += 32) {
    if (range.end - range.begin > 32) at = look_at<kRagged>(p, first, each, past);  // else it has just been looked at
    const int64_t offset = begin - (steps + at.upto - at.length);
    const bool mine = offset >= 0 && offset < at.length;
    const unsigned who = __ballot_sync(0xffffffffu, mine);
    if (who != 0) {
      const int source = __ffs(who) - 1;
      const int32_t passed = mine ? static_cast<int32_t>(quotient(offset, at.sequence.steps)) : 0;
      const int32_t step = mine ? static_cast<int32_t>(offset - int64_t{passed} * at.sequence.steps) : 0;
      walk.batch = first + source;
      walk.row = __shfl_sync(0xffffffffu, at.share.skip + passed, source);
      walk.step = __shfl_sync(0xffffffffu, step, source);
      walk.before = __shfl_sync(0xffffffffu, at.before, source);
      walk.claimed = __shfl_sync(0xffffffffu, at.claimed, source);
      walk.numbered = __shfl_sync(0xffffffffu, at.number, source);
      return walk;
    }
    steps += __shfl_sync(0xffffffffu, at.upto, 31);
  }
  walk.left = 0;
  return walk;
}

// By a whole warp.
__device__ inline Walk find_start(const Params& p, int block) {
  if (p.short_keys > 0 && caches_are_short(p)) {  // another kernel has done them
    if (block == 0 && threadIdx.x % 32 == 0) *p.live_rows = 0;
    return {};
  }
  return p.cu_q ? find_start_in<true>(p, block) : find_start_in<false>(p, block);
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
