// A block's way along the line of rows (schedule.hpp).
#pragma once

#include "cuda/sm90/decode/schedule.hpp"

namespace lla::cuda::sm90::decode {

__device__ __forceinline__ int64_t warp_prefix(int64_t x, int lane) {  // inclusive
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int64_t below = __shfl_up_sync(0xffffffffu, x, by);
    x += lane >= by ? below : 0;
  }
  return x;
}

// What a block has yet to do.
struct Walk {
  int32_t batch, row;  // next unit: row of the sequence
  int32_t granule;     // its first
  int32_t before;      // decoded rows of the sequences before
  int64_t left;        // granules; 0: nothing
};

// By a whole warp.
__device__ inline Walk find_start(const Params& p, int block, int blocks) {
  const int lane = threadIdx.x % 32;
  int64_t total = 0, rows = 0;
  for (int first = 0; first < p.batch; first += 32) {
    const Sequence s = first + lane < p.batch ? sequence_at(p, first + lane) : Sequence{};
    const int64_t upto = warp_prefix(s.rows, lane);
    const RowShare share = row_share(p, static_cast<int32_t>(rows + upto - s.rows), s.rows);
    total += __shfl_sync(0xffffffffu, warp_prefix(int64_t{share.count} * s.granules, lane), 31);
    rows += __shfl_sync(0xffffffffu, upto, 31);
  }
  if (block == 0 && lane == 0) {
    *p.live_rows = clamp_to(rows - p.first_row, 0, p.row_count);
  }
  const int64_t begin = share_begin(total, block, blocks), end = share_begin(total, block + 1, blocks);
  Walk walk{};
  walk.left = end - begin;
  if (walk.left == 0) return walk;
  int64_t granules = 0;
  rows = 0;
  for (int first = 0; first < p.batch; first += 32) {
    const Sequence s = first + lane < p.batch ? sequence_at(p, first + lane) : Sequence{};
    const int64_t upto = warp_prefix(s.rows, lane);
    const int32_t before = static_cast<int32_t>(rows + upto - s.rows);
    const RowShare share = row_share(p, before, s.rows);
    const int64_t length = int64_t{share.count} * s.granules;
    const int64_t sum = warp_prefix(length, lane);
    const int64_t offset = begin - (granules + sum - length);
    const bool mine = offset >= 0 && offset < length;
    const unsigned who = __ballot_sync(0xffffffffu, mine);
    if (who != 0) {
      const int source = __ffs(who) - 1;
      const int32_t row = mine ? share.skip + static_cast<int32_t>(offset / s.granules) : 0;
      const int32_t granule = mine ? static_cast<int32_t>(offset % s.granules) : 0;
      walk.batch = first + source;
      walk.row = __shfl_sync(0xffffffffu, row, source);
      walk.granule = __shfl_sync(0xffffffffu, granule, source);
      walk.before = __shfl_sync(0xffffffffu, before, source);
      return walk;
    }
    granules += __shfl_sync(0xffffffffu, sum, 31);
    rows += __shfl_sync(0xffffffffu, upto, 31);
  }
  walk.left = 0;
  return walk;
}

// A part of one row.
struct Unit {
  int32_t batch, head, index;  // query head, query of the sequence
  int32_t position;            // of the query in q
  int32_t local;               // row of this launch
  Keys row, part;
  bool first, last;  // part of the row
  bool invalid;      // the sequence is not usable
};

// The next unit; moves on. Only where something is left.
__device__ __forceinline__ Unit take(const Params& p, Walk& walk) {
  Sequence s = sequence_at(p, walk.batch);
  RowShare share = row_share(p, walk.before, s.rows);
  while (walk.row >= share.skip + share.count) {  // on to the next sequence with rows in this launch
    walk.before += s.rows;
    ++walk.batch;
    s = sequence_at(p, walk.batch);
    share = row_share(p, walk.before, s.rows);
    walk.row = share.skip;
    walk.granule = 0;
  }
  const RowPlace place = row_place(p, s, walk.row);
  Unit u;
  u.batch = walk.batch, u.head = place.head, u.index = place.index;
  u.position = s.start_q + place.index;
  u.local = walk.before + walk.row - p.first_row;
  u.row = keys_of(p, s, place.index);
  u.invalid = s.invalid;
  const int32_t count = static_cast<int32_t>(walk.left < s.granules - walk.granule ? walk.left : s.granules - walk.granule);
  u.first = walk.granule == 0;
  u.last = walk.granule + count == s.granules;
  u.part.begin = min(u.row.begin + walk.granule * kGranule, u.row.end);
  u.part.end = min(u.part.begin + count * kGranule, u.row.end);
  walk.left -= count;
  walk.granule += count;
  if (walk.granule == s.granules) ++walk.row, walk.granule = 0;
  return u;
}

}  // namespace lla::cuda::sm90::decode
