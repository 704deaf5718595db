// The fetching warps: they take the block's units and bring their keys and values, as far ahead as the ring has room.
#pragma once

#include "cuda/sm90/decode/stages.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kMostRedos = 2;

template <class C>
struct Fetcher {
  static constexpr int kThreads = 32 * C::kFetchers, kOwnKeys = C::kStageKeys / C::kFetchers;
  static_assert(kOwnKeys <= 32 || !C::kSmallPages);
  Shared<C>& s;
  const Params& p;
  const int thread, lane = thread % 32, warp = thread / 32;
  int stage = 0;  // next
  uint32_t parity = 0;
  bool invalid = false;
  Walk walk{};  // the first thread's
  int redo = 0;

  __device__ __forceinline__ Fetcher(Shared<C>& shared, const Params& params, int own)
      : s(shared), p(params), thread(own) {}

  __device__ __forceinline__ void sync() const {
    if constexpr (C::kFetchers > 1) {
      named_sync(kFetcherBarrier, kThreads);
    } else {
      __syncwarp();
    }
  }

  // Where sums are not finite: whether those of the keys alone are, so that it is values that are too large.
  __device__ __forceinline__ bool keys_fit(int partial) const {
    const float* const matrix = p.partials + int64_t{partial} * partial_floats(C::kDim) + partial_matrix(C::kDim);
    float sum = 0;  // 0 times what is not finite is NaN
#pragma unroll 1
    for (int i = 0; i < 128 * C::kMultipliers; ++i) {
      const ProductTile keys = key_tile(C::kDim, i / 128);
      const float4 x = __ldcg(reinterpret_cast<const float4*>(matrix + keys.from) + keys.quads * 128 + i % 128);
      sum += 0 * (x.x + x.y + x.z + x.w);
    }
    return sum == 0;
  }

  // The next unit along the walk: of a repetition, the next that asked for it.
  __device__ __forceinline__ void take_unit(int last_row) {
    if (thread > 0) return;
    FetchedUnit& to = s.next;
    to.unit.local = kNoUnit;
    while (walk.left > 0) {
      const Unit u = take(p, walk);
      int key_redo = 0;
      if (redo > 0) {
        const volatile int32_t* const again =
            reinterpret_cast<const PartialHead*>(p.partials + int64_t{u.partial} * partial_floats(C::kDim))->again;
        const int32_t apart = again[2];
        const bool sums = (again[0] | again[C::kMultipliers - 1]) != 0;
        if (!sums && (apart & (kKeysTooLarge | kValuesTooLarge)) == 0) continue;
        key_redo = (apart >> kTooLargeBits) + ((apart & kKeysTooLarge) != 0 || (sums && !keys_fit(u.partial)) ? 1 : 0);
      }
      record_row(p, u);
      to.unit = u;
      to.redo = redo, to.key_redo = key_redo, to.known = u.local == last_row, to.missing = 0;
      const int first = min(kReferenceKeys, u.row.end - aligned(u.row.begin));
      to.before = u.first || to.known ? 0 : (first + C::kStageKeys - 1) / C::kStageKeys;
      return;
    }
  }

  // A lane's place in the stages of a unit, one after the other: a box of the copy engine, or a single row. What a stage
  // takes is one chain of latencies: no divisions, nothing is read twice.
  struct Place {
    int key, begin, end;  // of this lane's, and of those that count
    int index, slot;      // in the table, and within the page
    int page;
    bool there;
  };
  __device__ __forceinline__ int length() const { return C::kSmallPages ? 1 : p.cache.box; }
  __device__ __forceinline__ void start_at(Place& at, int first, const Keys& keys) const {
    const int own = lane * length(), room = C::kSmallPages ? kOwnKeys : C::kStageKeys;
    at.key = first + (C::kSmallPages ? warp * kOwnKeys : 0) + own;
    at.begin = keys.begin - length(), at.end = own < room ? keys.end : 0;
    at.index = p.cache.table ? at.key / p.cache.page_size : 0;
    at.slot = at.key - at.index * p.cache.page_size;
  }
  __device__ __forceinline__ void look(Place& at, const int32_t* table, int batch) const {
    at.there = at.key < at.end && at.key > at.begin;
    at.page = batch;
    if (table && at.there) at.page = table[at.index];
  }
  __device__ __forceinline__ void move_on(Place& at, int pages, int rest) const {
    at.key += C::kStageKeys, at.slot += rest, at.index += pages;
    if (p.cache.table && at.slot >= p.cache.page_size) at.slot -= p.cache.page_size, ++at.index;
  }

  // Where there are two warps one brings the keys, one the values. Every request by one elected thread, whose operands
  // all threads know: those of several threads would be issued in a slow loop.
  static constexpr int kOwnParts = 2 * C::kParts / C::kFetchers;
  __device__ __forceinline__ void copy_box(int stage, int offset, int kv_head, int slot, int page) {
    const uint32_t to = shared_address(s.stage[stage]) + offset;
#pragma unroll
    for (int own = 0; own < kOwnParts; ++own) {
      const bool values = C::kFetchers == 1 ? own >= C::kParts : warp == 1;
      load_box(to + (values ? C::kValues : 0) + own % C::kParts * C::kPartBytes, values ? &p.value_map : &p.key_map,
               64 * (own % C::kParts), kv_head, slot, page, s.loaded[stage],
               p.keys_are_shared ? kEvictNormal : kEvictFirst);
    }
  }
  __device__ __forceinline__ void copy_boxes(const Place& at, int kv_head, int boxes, int stage) {
    const int box = p.cache.box;
    const unsigned all = __ballot_sync(0xffffffffu, at.there);
    if (elected()) s.loaded[stage].arrive_expecting(__popc(all) * box * kOwnParts * 128);
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < boxes; ++i) {
      const int page = __shfl_sync(0xffffffffu, at.page, i), slot = __shfl_sync(0xffffffffu, at.slot, i);
      if ((all >> i & 1) && elected()) copy_box(stage, i * box * 128, kv_head, slot, page);
      __syncwarp();
    }
  }

  // Sixteen bytes at a time, eight threads a row.
  __device__ __forceinline__ void copy_single(const Place& at, int kv_head, int stage) {
    const core::Operand &k = p.cache.k, &v = p.cache.v;
    const int64_t own_k = at.page * k.stride[0] + at.slot * k.stride[1] + kv_head * k.stride[2];
    const int64_t own_v = at.page * v.stride[0] + at.slot * v.stride[1] + kv_head * v.stride[2];
    const unsigned all = __ballot_sync(0xffffffffu, at.there);
#pragma unroll
    for (int first = 0; first < kOwnKeys; first += 4) {
      const int own = first + lane / 8, row = warp * kOwnKeys + own;
      const int64_t from_k = __shfl_sync(0xffffffffu, own_k, own), from_v = __shfl_sync(0xffffffffu, own_v, own);
      const bool there = all >> own & 1;
#pragma unroll
      for (int part = 0; part < 2 * C::kParts; ++part) {
        const bool values = part >= C::kParts;
        const int chunk = part % C::kParts * 8 + lane % 8;
        const bool inside = there && 8 * chunk < (values ? p.value_dim : p.dim);
        copy_ahead(s.stage[stage] + (values ? C::kValues : 0) + raw_offset<C::kPartBytes>(row, chunk),
                   static_cast<const uint16_t*>(values ? v.data : k.data) +
                       (inside ? (values ? from_v : from_k) + 8 * chunk : 0),
                   inside);
      }
    }
    s.loaded[stage].arrive_when_copied();
    __syncwarp();
  }

  __device__ __forceinline__ void copy_slowly(const Unit& u, int first, const Keys& keys, int stage) {
#pragma unroll 1
    for (int from = warp * kWarpKeys; from < C::kStageKeys; from += C::kFetchers * kWarpKeys) {
      unsigned char* const to = s.stage[stage] + from * 128;
      fill_slowly<C, C::kPartBytes>(p, u, first + from, keys, invalid, {to, to + C::kValues});
    }
    __syncwarp();
    arrive_filled<C>(s.loaded[stage]);
  }

  __device__ __forceinline__ void wait_empty() const { s.empty[stage].wait(parity ^ 1); }
  __device__ __forceinline__ void next_stage() {
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }

  // Stages of keys from `first` on, of which `keys` count.
  __device__ __forceinline__ void bring(const Unit& u, int first, const Keys& keys, int count) {
    if (count == 0) return;
    const int kv_head = u.kv_head, batch = u.batch;
    if (!p.cache.vectors) {
#pragma unroll 1
      for (int i = 0; i < count; ++i, next_stage()) {
        wait_empty();
        copy_slowly(u, first + i * C::kStageKeys, keys, stage);
      }
      return;
    }
    if (!C::kSmallPages && !p.cache.table) {  // a stage is one box of each map
#pragma unroll 1
      for (int i = 0; i < count; ++i, next_stage()) {
        wait_empty();
        if (elected()) {
          s.loaded[stage].arrive_expecting(kOwnParts * C::kPartBytes);
          copy_box(stage, 0, kv_head, first + i * C::kStageKeys, batch);
        }
        __syncwarp();
      }
      return;
    }
    const int32_t* const table = p.cache.table ? p.cache.table + batch * p.cache.table_stride : nullptr;
    const int pages = table ? C::kStageKeys / p.cache.page_size : 0;
    const int rest = C::kStageKeys - pages * p.cache.page_size, boxes = C::kStageKeys / length();
    Place next;
    start_at(next, first, keys);
    look(next, table, batch);
#pragma unroll 1
    for (int i = 0; i < count; ++i, next_stage()) {
      Place at = next;
      move_on(next, pages, rest);
      look(next, table, batch);  // on its way meanwhile
      wait_empty();
      if (table && at.there && !(at.page >= 0 && at.page < p.cache.pages)) {
        at.there = false, at.page = 0, invalid = true;
      }
      if constexpr (C::kSmallPages) {
        copy_single(at, kv_head, stage);
      } else {
        copy_boxes(at, kv_head, boxes, stage);
      }
    }
  }
  // All stages of a unit. The next one is taken, which takes a while, when a ring of stages is on its way.
  __device__ __forceinline__ void bring(FetchedUnit& u) {
    const Steps<C> steps(u);
    invalid = u.unit.first && others_miss_a_page(p.cache, u.unit, thread, kThreads);
    const int early = min(steps.tiles, C::kStages);
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      const bool reference = part == 0;
      const int from = part == 2 ? early : 0;
      const int count = reference ? steps.before : part == 1 ? early : steps.tiles - early;
      bring(u.unit, reference ? aligned(u.unit.row.begin) : u.unit.start + from * C::kStageKeys,
            reference ? u.unit.row : u.unit.keys, count);
      if (part == 1) take_unit(u.unit.local);
    }
    wait_empty();  // the last is filled by the warp that looks after units
    if (invalid) *static_cast<volatile int32_t*>(&u.missing) = 1;
    __syncwarp();
    arrive_filled<C>(s.loaded[stage]);
    next_stage();
  }

  // The block's units, and once more those that need smaller scales.
  __device__ __forceinline__ void run() {
    if (warp == 0) {
      const Walk start = find_start(p, blockIdx.x);
      if (lane == 0) s.start = start;
      __syncwarp();
    }
    int unit = 0;
    const auto room = [&]() -> FetchedUnit& {
      if (unit >= 2) s.done[unit & 1].wait((unit / 2 - 1) & 1);
      sync();
      return s.units[unit & 1];
    };
    const auto tell = [&] {
      sync();
      if (warp == 0) s.taken[unit & 1].arrive_for_warp();
      ++unit;
    };
#pragma unroll 1
    for (;; ++redo) {
      if (thread == 0) walk = s.start;
      take_unit(-1);
#pragma unroll 1
      for (;;) {
        FetchedUnit& u = room();
        for (int i = thread; i < static_cast<int>(sizeof(u) / 4); i += kThreads) {
          reinterpret_cast<int32_t*>(&u)[i] = reinterpret_cast<const int32_t*>(&s.next)[i];
        }
        tell();
        if (u.unit.local == kNoUnit) break;
        bring(u);
      }
      // All of them are in their partials when the ring is empty: this waits for the last stage, if there was one.
      const int last = stage == 0 ? C::kStages - 1 : stage - 1;
      s.empty[last].wait(stage == 0 ? parity ^ 1 : parity);
      const bool again = *static_cast<volatile int32_t*>(&s.overflow) != 0 && redo < kMostRedos;
      sync();
      if (!again) break;
      if (thread == 0) s.overflow = 0;
    }
    FetchedUnit& u = room();
    if (thread == 0) u.unit.local = kNoMore;
    tell();
    if (warp > 0) return;
    wait_empty();
    if (lane == 0) s.head[stage].flags = kStop;
    __syncwarp();
    s.full[stage].arrive_for_warp();
  }
};

}  // namespace lla::cuda::sm90::decode
