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
  uint32_t position = 0;
  bool invalid = false;

  __device__ __forceinline__ Fetcher(Shared<C>& shared, const Params& params, int own)
      : s(shared), p(params), thread(own) {}

  __device__ __forceinline__ void sync() const {
    if constexpr (C::kFetchers > 1) {
      named_sync(kFetcherBarrier, kThreads);
    } else {
      __syncwarp();
    }
  }

  // The next unit along the walk: of a repetition, the next that asked for it.
  __device__ __forceinline__ void take_unit(Walk& walk, int redo, FetchedUnit& to, int last_row) const {
    to.unit.local = kNoUnit;
    while (walk.left > 0) {
      const Unit u = take(p, walk);
      if (redo > 0) {
        const volatile int32_t* const again =
            reinterpret_cast<const PartialHead*>(p.partials + int64_t{u.partial} * partial_floats(C::kDim))->again;
        if ((again[0] | again[C::kMultipliers - 1] | again[2]) == 0) continue;
      }
      record_row(p, u);
      to.unit = u;
      to.redo = redo, to.known = u.local == last_row, to.missing = 0;
      const int first = min(kReferenceKeys, u.row.end - aligned(u.row.begin));
      to.before = u.first || to.known ? 0 : (first + C::kStageKeys - 1) / C::kStageKeys;
      return;
    }
  }

  // The first key of a unit's stage, and the keys that count there.
  __device__ __forceinline__ int first_key(const FetchedUnit& u, int step, Keys& keys) const {
    const bool reference = step < u.before;
    keys = reference ? u.unit.row : u.unit.keys;
    return reference ? aligned(u.unit.row.begin) + step * C::kStageKeys
                     : u.unit.start + (step - u.before) * C::kStageKeys;
  }

  // Where this lane's keys of a stage lie: of the copy engine's boxes one, of single rows one.
  struct Place {
    int key = 0, page = 0;
    bool there = false;
  };
  __device__ __forceinline__ Place look(const FetchedUnit& u, int step, int count) const {
    Place at;
    if (step + 1 >= count) return at;
    Keys keys;
    const int first = first_key(u, step, keys);
    const int length = C::kSmallPages ? 1 : p.cache.box, room = C::kSmallPages ? kOwnKeys : C::kStageKeys;
    at.key = first + (C::kSmallPages ? warp * kOwnKeys : 0) + lane * length;
    at.there = lane * length < room && at.key < keys.end && at.key + length > keys.begin;
    at.page = u.unit.batch;
    if (p.cache.table && at.there) {
      at.page = p.cache.table[u.unit.batch * p.cache.table_stride + at.key / p.cache.page_size];
    }
    return at;
  }

  // Where there are two warps one brings the keys, one the values. Every request by one elected thread, whose operands
  // all threads know: those of several threads would be issued in a slow loop.
  __device__ __forceinline__ void copy_boxes(const FetchedUnit& u, const Place& at, int slot, int stage) {
    constexpr int kOwnParts = 2 * C::kParts / C::kFetchers;
    Barrier& here = s.loaded[stage];
    const int box = p.cache.box, boxes = C::kStageKeys / box;
    const unsigned all = __ballot_sync(0xffffffffu, at.there);
    const uint32_t to = shared_address(s.stage[stage]) + warp * (kOwnParts * C::kPartBytes);
    if (elected()) here.arrive_expecting(__popc(all) * box * kOwnParts * 128);
    __syncwarp();
#pragma unroll 4
    for (int i = 0; i < boxes; ++i) {
      const int page = __shfl_sync(0xffffffffu, at.page, i), row = __shfl_sync(0xffffffffu, slot, i);
      if (!(all >> i & 1)) continue;
      if (elected()) {
#pragma unroll
        for (int own = 0; own < kOwnParts; ++own) {
          const int part = C::kFetchers == 1 ? own : warp * kOwnParts + own;
          load_box(to + own * C::kPartBytes + i * box * 128, part < C::kParts ? &p.key_map : &p.value_map,
                   64 * (part % C::kParts), u.unit.kv_head, row, page, here);
        }
      }
      __syncwarp();
    }
  }

  // Sixteen bytes at a time, eight threads a row.
  __device__ __forceinline__ void copy_single(const FetchedUnit& u, const Place& at, int slot, int stage) {
    const core::Operand &k = p.cache.k, &v = p.cache.v;
    const int64_t own_k = at.page * k.stride[0] + slot * k.stride[1] + u.unit.kv_head * k.stride[2];
    const int64_t own_v = at.page * v.stride[0] + slot * v.stride[1] + u.unit.kv_head * v.stride[2];
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
        copy_ahead(s.stage[stage] + part * C::kPartBytes + row * 128 + ((lane % 8) ^ (row & 7)) * 16,
                   static_cast<const uint16_t*>(values ? v.data : k.data) +
                       (inside ? (values ? from_v : from_k) + 8 * chunk : 0),
                   inside);
      }
    }
    s.loaded[stage].arrive_when_copied();
    __syncwarp();
    if (lane == 0) s.loaded[stage].arrive();
  }

  __device__ __forceinline__ void copy_slowly(const FetchedUnit& u, int step, int stage) {
    Keys keys;
    const int first = first_key(u, step, keys);
#pragma unroll 1
    for (int from = warp * kWarpKeys; from < C::kStageKeys; from += C::kFetchers * kWarpKeys) {
      unsigned char* const to = s.stage[stage] + from * 128;
      fill_slowly<C, C::kPartBytes>(p, u.unit, first + from, keys, invalid, {to, to + C::kParts * C::kPartBytes});
    }
    __syncwarp();
    if (lane == 0) s.loaded[stage].arrive();
  }

  // All stages of a unit.
  __device__ __forceinline__ void bring(FetchedUnit& u) {
    const int count = Steps<C>(u).count();
    invalid = u.unit.first && others_miss_a_page(p.cache, u.unit, thread, kThreads);
    Place next = look(u, 0, count);
#pragma unroll 1
    for (int step = 0; step < count; ++step, ++position) {
      Place at = next;
      next = look(u, step + 1, count);  // on its way meanwhile
      const int stage = stage_of<C>(position);
      s.empty[stage].wait(parity_of<C>(position) ^ 1);
      if (step + 1 == count) {  // filled by a warp that converts
        if (invalid) *static_cast<volatile int32_t*>(&u.missing) = 1;
        __syncwarp();
        if (lane == 0) s.loaded[stage].arrive();
      } else if (!p.cache.vectors) {
        copy_slowly(u, step, stage);
      } else {
        int slot = at.key;
        if (p.cache.table) {
          slot = at.key % p.cache.page_size;
          if (at.there && !(at.page >= 0 && at.page < p.cache.pages)) at.there = false, at.page = 0, invalid = true;
        }
        if constexpr (C::kSmallPages) {
          copy_single(u, at, slot, stage);
        } else {
          copy_boxes(u, at, slot, stage);
        }
      }
    }
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
    for (int redo = 0;; ++redo) {
      Walk walk{};
      if (thread == 0) walk = s.start;
      int last_row = -1;
#pragma unroll 1
      for (;;) {
        FetchedUnit& u = room();
        if (thread == 0) take_unit(walk, redo, u, last_row);
        tell();
        last_row = u.unit.local;
        if (last_row == kNoUnit) break;
        bring(u);
      }
      if (position > 0) s.empty[stage_of<C>(position - 1)].wait(parity_of<C>(position - 1));
      const bool again = *static_cast<volatile int32_t*>(&s.overflow) != 0 && redo < kMostRedos;
      sync();
      if (!again) break;
      if (thread == 0) s.overflow = 0;
    }
    FetchedUnit& u = room();
    if (thread == 0) u.unit.local = kNoMore;
    tell();
    if (warp > 0) return;
    const int stage = stage_of<C>(position);
    s.empty[stage].wait(parity_of<C>(position) ^ 1);
    if (lane == 0) s.head[stage].flags = kStop;
    __syncwarp();
    s.full[stage].arrive_for_warp();
  }
};

}  // namespace lla::cuda::sm90::decode
