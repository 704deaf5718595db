// From the cache into a warp's own shared memory: sixteen keys and their values, wherever they lie. The copy engine
// brings them, as many at a time as lie in one page; rows it cannot take are loaded element by element.
#pragma once

#include <cuda.h>

#include "cuda/sm90/decode/shared.cuh"
#include "cuda/sm90/decode/walk.cuh"

namespace lla::cuda::sm90::decode {

// Raw rows lie as the copy engine's 128-byte swizzle leaves them: 64 columns after the other, 16-byte chunk c of row r
// at c ^ (r % 8).
template <int kBlockBytes = kWarpKeys * 128>  // from one 64 columns to the next
__device__ __forceinline__ int raw_offset(int row, int chunk) {
  return (chunk / 8) * kBlockBytes + row * 128 + ((chunk % 8) ^ (row & 7)) * 16;
}
// The address a lane gives for the transposed matrices of chunks 0 and 1 (keys 0-7, 8-15 of each).
__device__ __forceinline__ uint32_t raw_start(const unsigned char* rows) {
  const int lane = threadIdx.x % 32;
  return opaque(shared_address(rows) + raw_offset(lane % 16, lane / 16));
}
// The same for chunks 2i and 2i + 1.
template <int kBoxBytes = kWarpKeys * 128>
__device__ __forceinline__ uint32_t raw_at(uint32_t start, int i) {
  return (start ^ (32 * (i % 4))) + (i / 4) * kBoxBytes;
}

// Page and slot of a key; page -1 where the table is wrong.
__device__ __forceinline__ int table_entry(const Cache& cache, const Unit& from, int key) {
  return cache.table[from.batch * cache.table_stride + key / cache.page_size];
}
__device__ __forceinline__ int2 page_of(const Cache& cache, int key, int page) {
  return {page >= 0 && page < cache.pages ? page : -1, key % cache.page_size};
}
__device__ __forceinline__ int2 page_of(const Cache& cache, const Unit& from, int key) {
  if (!cache.table) return {from.batch, key};
  return page_of(cache, key, table_entry(cache, from, key));
}

// Whether a page is missing that other rows of the sequence need and this one does not: then it is not usable either.
// There are few of those, before the row's first key and behind its last. By `threads` threads, each of which says what
// it has found.
__device__ __forceinline__ bool others_miss_a_page(const Cache& cache, const Unit& from, int thread, int threads) {
  const Keys sequence = from.sequence;
  bool missing = false;
  if (!cache.table) return missing;
  for (int key = sequence.begin + thread; key < min(from.row.begin, sequence.end); key += threads) {
    missing |= page_of(cache, from, key).x < 0;
  }
  for (int key = max(from.row.end, sequence.begin) + thread; key < sequence.end; key += threads) {
    missing |= page_of(cache, from, key).x < 0;
  }
  return missing;
}

// The keys of sixteen that a row sees, as bits.
__device__ __forceinline__ uint32_t seen_of(const Keys& keys, int first) {
  const int begin = max(0, min(kWarpKeys, keys.begin - first)), end = max(0, min(kWarpKeys, keys.end - first));
  return (1u << end) - (1u << min(begin, end));
}

// The copy engine takes some 18 cycles for every request, however small: those of fewer keys are not for it.
inline constexpr int kLeastBox = 4;
inline bool small_pages(const Cache& cache) { return cache.box < kLeastBox; }

// A slot's copies arrive at its barrier. Where rows come one by one each thread's do so on their own, and then all
// threads of the warp arrive however the slot is filled; else one of them does.
template <class C>
inline constexpr int kFillArrivals = C::kSmallPages ? 32 : 1;
template <class C>
__device__ __forceinline__ void arrive_filled(Barrier& barrier) {
  if (C::kSmallPages || threadIdx.x % 32 == 0) barrier.arrive();
}

// Sixteen keys and their values as they came.
struct RawTile {
  unsigned char *keys, *values;
};

// Rows of a tile that are not finite, as bits of their keys; they are cleared, for nought times them would not be
// nought in rows that do not see the key.
template <class C>
__device__ __forceinline__ uint32_t clear_poisoned(unsigned char* rows) {
  const int lane = threadIdx.x % 32, key = lane % 16;
  constexpr uint32_t kExponent = C::kBf16 ? 0x7f80 : 0x7c00;
  const auto wrong = [](uint32_t x) { return (x & kExponent) == kExponent || (x >> 16 & kExponent) == kExponent; };
  bool poisoned = false;
  for (int chunk = lane / 16; chunk < C::kChunks; chunk += 2) {
    const uint4 v = *reinterpret_cast<const uint4*>(rows + raw_offset<C::kBoxBytes>(key, chunk));
    poisoned |= wrong(v.x) || wrong(v.y) || wrong(v.z) || wrong(v.w);
  }
  uint32_t all = __ballot_sync(0xffffffffu, poisoned);
  all = (all | all >> 16) & 0xffff;
  if (all == 0) return 0;
  for (int chunk = lane / 16; chunk < C::kChunks; chunk += 2) {
    if (all >> key & 1) {
      *reinterpret_cast<uint4*>(rows + raw_offset<C::kBoxBytes>(key, chunk)) = make_uint4(0, 0, 0, 0);
    }
  }
  fence_async_proxy();  // the copy engine writes here next
  __syncwarp();
  return all;
}

template <class C, int kBlockBytes = kWarpKeys * 128, int kTensors = 2>
__device__ __forceinline__ void fill_slowly(const Params& p, const Unit& from, int first, const Keys& keys,
                                            bool& invalid, const RawTile& to) {
  const int lane = threadIdx.x % 32;
  const uint32_t seen = seen_of(keys, first);
#pragma unroll 1
  for (int which = 0; which < kTensors; ++which) {
    const core::Operand& operand = which == 0 ? p.cache.k : p.cache.v;
    const uint16_t* base = static_cast<const uint16_t*>(operand.data);
#pragma unroll 1
    for (int row = 0; row < kWarpKeys; ++row) {
      if (!(seen >> row & 1)) continue;
      const int2 at = page_of(p.cache, from, first + row);
      invalid |= at.x < 0;
#pragma unroll 1
      for (int d = lane; d < C::kDim; d += 32) {
        const bool there = at.x >= 0 && d < (which == 0 ? p.dim : p.value_dim);
        const int64_t element = at.x * operand.stride[0] + at.y * operand.stride[1] + from.kv_head * operand.stride[2] +
                                d * operand.stride[3];
        *reinterpret_cast<uint16_t*>((which == 0 ? to.keys : to.values) + raw_offset<kBlockBytes>(row, d / 8) +
                                     d % 8 * 2) = there ? base[element] : 0;
      }
    }
  }
}

// Zeros into the rows that are not in `seen`.
template <class C, int kBlockBytes = kWarpKeys * 128, int kTensors = 2>
__device__ __forceinline__ void clear_rows(const RawTile& rows, uint32_t seen) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int e = lane; e < kWarpKeys * C::kChunks * kTensors; e += 32) {
    const int row = e % kWarpKeys, chunk = e / kWarpKeys % C::kChunks, which = e / (kWarpKeys * C::kChunks);
    if (!(seen >> row & 1)) {
      *reinterpret_cast<uint4*>((which == 0 ? rows.keys : rows.values) + raw_offset<kBlockBytes>(row, chunk)) =
          make_uint4(0, 0, 0, 0);
    }
  }
  fence_async_proxy();  // the copy engine writes here next
}

// A warp's ring of slots: it asks for tiles and takes them in the same order. S: what has the slots. Of 64 columns after
// the other each is C::kBoxBytes behind the last; without C::kFetchValues it brings keys alone. A warp's next tile is
// C::kTileStep keys on, as a rule: its pages are looked up ahead, for their copies wait for the table. 0: they are not.
template <class C, class S>
struct Ring {
  S& s;
  const int warp;
  uint32_t asked = 0, taken = 0;
  int entry_ahead = 0, first_ahead = -1, batch_ahead = -1;  // this lane's entry of the table; -1: none

  // Page and slot of this lane's key of the tile at `first`.
  __device__ __forceinline__ int2 place(const Cache& cache, const Unit& from, int first, int key) const {
    if (C::kTileStep == 0 || !cache.table) return page_of(cache, from, key);
    const bool known = first_ahead == first && batch_ahead == from.batch;
    return page_of(cache, key, known ? entry_ahead : table_entry(cache, from, key));
  }
  __device__ __forceinline__ void look_ahead(const Cache& cache, const Unit& from, int first, const Keys& keys,
                                             int box) {
    if (C::kTileStep == 0 || !cache.table) return;
    const int lane = threadIdx.x % 32, next = first + C::kTileStep, key = next + lane * box;
    first_ahead = -1;
    if (lane * box >= kWarpKeys || key >= keys.end || key + box <= keys.begin) return;
    entry_ahead = table_entry(cache, from, key);
    first_ahead = next, batch_ahead = from.batch;
  }

  __device__ __forceinline__ Barrier& barrier(uint32_t n) const { return s.loaded[warp][n % C::kRawSlots]; }
  __device__ __forceinline__ RawTile tile(uint32_t n) const { return s.tile(warp, n % C::kRawSlots); }
  static constexpr int kTensors = C::kFetchValues ? 2 : 1;

  // Starts the copies of keys [first, first + 16) that `keys` includes.
  __device__ __forceinline__ void ask(const Params& p, const Unit& from, int first, const Keys& keys, bool& invalid) {
    const int lane = threadIdx.x % 32;
    const RawTile to = tile(asked);
    Barrier& here = barrier(asked++);
    const Cache& cache = p.cache;
    if (!cache.vectors) {
      fill_slowly<C, C::kBoxBytes, kTensors>(p, from, first, keys, invalid, to);
      __syncwarp();
      arrive_filled<C>(here);
      return;
    }
    if constexpr (C::kSmallPages) {
      copy_rows(p, from, first, keys, invalid, to);
      here.arrive_when_copied();
      look_ahead(cache, from, first, keys, 1);
      __syncwarp();
      return;
    }
    const int box = cache.box, key = first + lane * box;
    bool there = lane * box < kWarpKeys && key < keys.end && key + box > keys.begin;
    int2 at{0, 0};
    if (there) {
      at = place(cache, from, first, key);
      invalid |= at.x < 0;
      there = at.x >= 0;
    }
    look_ahead(cache, from, first, keys, box);
    const unsigned all = __ballot_sync(0xffffffffu, there);
    const auto copy = [&](int row) {
#pragma unroll
      for (int which = 0; which < kTensors; ++which) {
        const uint32_t start = shared_address(which == 0 ? to.keys : to.values) + row * 128;
#pragma unroll
        for (int box = 0; box < C::kDim / 64; ++box) {
          load_box(start + box * C::kBoxBytes, which == 0 ? &p.key_map : &p.value_map, 64 * box, from.kv_head, at.y,
                   at.x, here);
        }
      }
    };
    if (box == kWarpKeys) {  // all lanes know of the one copy
      at.x = __shfl_sync(0xffffffffu, at.x, 0), at.y = __shfl_sync(0xffffffffu, at.y, 0);
      if (elected()) {
        here.arrive_expecting(__popc(all) * kWarpKeys * C::kDim * 2 * kTensors);
        if (all != 0) copy(0);
      }
      __syncwarp();
      return;
    }
    if (lane == 0) here.arrive_expecting(__popc(all) * box * C::kDim * 2 * kTensors);
    __syncwarp();
    if (there) copy(lane * box);
    __syncwarp();
  }

  // Sixteen bytes at a time, eight threads a row: whole lines.
  __device__ __forceinline__ void copy_rows(const Params& p, const Unit& from, int first, const Keys& keys,
                                            bool& invalid, const RawTile& to) const {
    constexpr int kRowThreads = 8, kRowsAtOnce = 32 / kRowThreads;
    constexpr int kUnroll = C::kTileStep == 0 ? 1 : kWarpKeys / kRowsAtOnce;  // the others have few registers
    const int lane = threadIdx.x % 32, key = first + lane;
    int2 own{-1, 0};
    if (lane < kWarpKeys && key >= keys.begin && key < keys.end) {
      own = place(p.cache, from, first, key);
      invalid |= own.x < 0;
    }
#pragma unroll kUnroll
    for (int i = 0; i < kWarpKeys; i += kRowsAtOnce) {
      const int row = i + lane / kRowThreads;
      const int2 at{__shfl_sync(0xffffffffu, own.x, row), __shfl_sync(0xffffffffu, own.y, row)};
#pragma unroll
      for (int which = 0; which < kTensors; ++which) {
        const core::Operand& operand = which == 0 ? p.cache.k : p.cache.v;
        const int width = which == 0 ? p.dim : p.value_dim;
        const uint16_t* const base = static_cast<const uint16_t*>(operand.data);
        const int64_t start =
            max(at.x, 0) * operand.stride[0] + at.y * operand.stride[1] + from.kv_head * operand.stride[2];
#pragma unroll
        for (int chunk = lane % kRowThreads; chunk < C::kChunks; chunk += kRowThreads) {
          const bool there = at.x >= 0 && 8 * chunk < width;
          copy_ahead((which == 0 ? to.keys : to.values) + raw_offset<C::kBoxBytes>(row, chunk),
                     base + (there ? start + 8 * chunk : 0), there);
        }
      }
    }
  }

  // The oldest tile asked for, once it is there.
  __device__ __forceinline__ RawTile look() const {
    barrier(taken).wait((taken / C::kRawSlots) & 1);
    return tile(taken);
  }
  // The same, and the next is the oldest. Rows that are not in `seen` are zeros.
  __device__ __forceinline__ RawTile take(uint32_t seen) {
    const RawTile here = look();
    ++taken;
    show(here, seen);
    return here;
  }
  __device__ __forceinline__ static void show(const RawTile& here, uint32_t seen) {
    if (seen != 0xffffu) clear_rows<C, C::kBoxBytes, kTensors>(here, seen);
    __syncwarp();
  }
};

}  // namespace lla::cuda::sm90::decode
