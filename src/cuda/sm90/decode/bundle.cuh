// Decode with x given where rows share keys: up to eight rows of a key head, a bundle, make one pass together. Bound by
// memory.
#pragma once

#include "cuda/sm90/decode/bundle_rows.cuh"
#include "cuda/sm90/decode/given_x_config.cuh"
#include "cuda/sm90/decode/given_x_merge.cuh"

namespace lla::cuda::sm90::decode {

template <class C>
struct BundleShared {
  static constexpr int kPublished = C::kDim == 128 ? 2 : 4;  // rows at a time: two blocks share the memory
  static constexpr int kDim = C::kDim;
  alignas(1024) unsigned char raw[C::kWarps][C::kRawSlots][2][C::kRawBytes];
  union {
    float2 query_x[kBundleRows][C::kDim];
    float sums[C::kWarps][kPublished][2 * C::kDim];
  };
  GivenXHead heads[C::kWarps][kPublished];
  float value[C::kWarps];  // see note_value
  Unit unit[2];            // at work, and the next; local is -1 behind the last
  Walk walk;
  Barrier loaded[C::kWarps][C::kRawSlots];

  __device__ __forceinline__ RawTile tile(int warp, int slot) { return {raw[warp][slot][0], raw[warp][slot][1]}; }
};

// What a warp asks for: tile after tile of its own, from one unit on into the next, so that memory is never idle.
template <class C>
struct Feed {
  Ring<C, BundleShared<C>> ring;
  int tile = 0;        // of the unit it is in, asked for next
  bool ahead = false;  // in the next unit
  bool invalid = false, invalid_ahead = false;

  __device__ __forceinline__ static int first_of(const Unit& u, int n) {
    return u.start + (n * C::kWarps + static_cast<int>(threadIdx.x / 32)) * kWarpKeys;
  }
  __device__ __forceinline__ bool ask(const Params& p, const Unit& now, const Unit& next) {
    if (!ahead) {
      if (first_of(now, tile) < now.keys.end) {
        ring.ask(p, now, first_of(now, tile++), now.keys, invalid);
        return true;
      }
      ahead = true, tile = 0;
    }
    if (next.local < 0 || first_of(next, tile) >= next.keys.end) return false;
    ring.ask(p, next, first_of(next, tile++), next.keys, invalid_ahead);
    return true;
  }
  __device__ __forceinline__ void fill(const Params& p, const Unit& now, const Unit& next) {
    while (ring.asked - ring.taken < C::kRawSlots && ask(p, now, next)) {
    }
  }
  __device__ __forceinline__ void next_unit() {
    if (!ahead) tile = 0;
    ahead = false;
    invalid = invalid_ahead, invalid_ahead = false;
  }
};

// One unit's share of a warp, for up to 4 kQuads rows.
template <class C, int kQuads>
struct BundlePass {
  BundleShared<C>& s;
  const Params& p;
  RowQuad<C> quad[kQuads];
  Keys common;  // keys that all rows see
  static constexpr int kPublished = BundleShared<C>::kPublished;

  __device__ __forceinline__ BundlePass(BundleShared<C>& shared, const Params& params, const Unit& u)
      : s(shared), p(params) {
    common = u.row;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const int row = n * kQuadRows + RowQuad<C>::row();
      const Keys seen = row < u.rows ? row_of(p, u, row).keys : u.row;
      quad[n].begin(s.query_x[row], seen);
      common.begin = max(common.begin, seen.begin), common.end = min(common.end, seen.end);
    }
    common.begin = __reduce_max_sync(0xffffffffu, common.begin);
    common.end = __reduce_min_sync(0xffffffffu, common.end);
  }

  __device__ __forceinline__ void tile(const RawTile& raw, int first) {
    float product[kQuads][2][4];
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) product[n][i / 4][i % 4] = 0;
    }
    const uint32_t keys = raw_start(raw.keys), values = raw_start(raw.values);
#pragma unroll
    for (int i = 0; i < C::kDim / 16; ++i) {
      uint32_t k[4];
      load_matrices(k, raw_at(keys, i));
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        warp_product<C::kBf16>(product[n][0], quad[n].operand[i], k[0], k[2]);
        warp_product<C::kBf16>(product[n][1], quad[n].operand[i], k[1], k[3]);
      }
    }
    const bool edge = first < common.begin || first + kWarpKeys > common.end;
    const uint32_t poisoned = edge ? clear_poisoned<C>(raw.values) : 0;
    uint32_t weights[kQuads][4];
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      quad[n].weigh(weights[n], product[n], 2 * p.half_scale, first, edge, poisoned);
    }
#pragma unroll
    for (int i = 0; i < C::kChunks / 2; ++i) {
      uint32_t v[4];
      load_transposed(v, raw_at(values, i));
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        warp_product<C::kBf16>(quad[n].sums[2 * i], weights[n], v[0], v[1]);
        warp_product<C::kBf16>(quad[n].sums[2 * i + 1], weights[n], v[2], v[3]);
      }
    }
  }

  // How large values are, for the status: the largest of this warp's first keys that all rows see.
  __device__ __forceinline__ void note_value(const Feed<C>& feed, const Unit& u) {
    const int lane = threadIdx.x % 32, first = Feed<C>::first_of(u, 0), key = first + lane % 16;
    uint32_t largest = 0;  // bits without sign, which are in order
    if (first < u.keys.end) {
      const unsigned char* const values = feed.ring.look().values;
      const bool seen = key >= common.begin && key < common.end;
#pragma unroll 1
      for (int chunk = lane / 16; seen && chunk < C::kChunks; chunk += 2) {
        const uint4 v = *reinterpret_cast<const uint4*>(values + raw_offset<C::kBoxBytes>(lane % 16, chunk));
        for (const uint32_t pair : {v.x, v.y, v.z, v.w}) {
          largest = ::max(largest, ::max(pair & 0x7fff, pair >> 16 & 0x7fff));
        }
      }
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) s.value[threadIdx.x / 32] = widen_pair<C::kBf16>(largest).x;
  }
  __device__ __forceinline__ float value() const {
    float largest = 0;
    for (int w = 0; w < C::kWarps; ++w) largest = fmaxf(largest, s.value[w]);
    return largest;
  }

  __device__ __forceinline__ void stream(Feed<C>& feed, const Unit& u, const Unit& next) {
    feed.fill(p, u, next);
    if (C::kBf16 && p.solved_x) note_value(feed, u);
#pragma unroll 1
    for (int n = 0; Feed<C>::first_of(u, n) < u.keys.end; ++n) {
      const int first = Feed<C>::first_of(u, n);
      tile(feed.ring.take(seen_of(u.keys, first)), first);
      __syncwarp();
      feed.ask(p, u, next);
    }
  }

  // All warps' sums of some rows, from the first-th of four on, into the part's partial. Between them all threads meet.
  __device__ __forceinline__ void publish(const RowQuad<C>& from, float* partial, int first, int rows, bool wrong) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = RowQuad<C>::row() - first;
    const bool low = RowQuad<C>::low();
    const float total = keys_sum(from.total);
    if (mine >= 0 && mine < kPublished) {
      const float unscaled = low ? 1 : 1 / from.e_scale;
      float* const to = &s.sums[warp][mine][low ? 0 : C::kDim];
#pragma unroll
      for (int i = 0; i < C::kChunks; ++i) {
        *reinterpret_cast<float2*>(to + 8 * i + lane % 4 * 2) = {(from.sums[i][0] + from.sums[i][2]) * unscaled,
                                                                 (from.sums[i][1] + from.sums[i][3]) * unscaled};
      }
      GivenXHead& head = s.heads[warp][mine];
      if (lane % 4 == 0) {
        if (low) {
          head.max = from.max - RowQuad<C>::kLift, head.centre = from.centre, head.omega = total;
        } else {
          head.omega_e = total * unscaled;
        }
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < rows * 2 * C::kDim; at += C::kThreads) {
      const int row = at / (2 * C::kDim), d = at % (2 * C::kDim);
      float top = -INFINITY, reference = 0;
      for (int w = 0; w < C::kWarps; ++w) {
        if (s.heads[w][row].max > top) top = s.heads[w][row].max, reference = s.heads[w][row].centre;
      }
      float sum = 0, omega = 0, omega_e = 0;
      for (int w = 0; w < C::kWarps; ++w) {
        const GivenXHead& part = s.heads[w][row];
        if (part.omega == 0) continue;  // no key
        const float factor = exp2_fast(part.max - top), by = part.centre - reference;
        float x = s.sums[w][row][d];
        if (d >= C::kDim) x = fmaf(by, s.sums[w][row][d - C::kDim], x);
        sum = fmaf(factor, x, sum);
        omega = fmaf(factor, part.omega, omega);
        omega_e = fmaf(factor, fmaf(by, part.omega, part.omega_e), omega_e);
      }
      float* const out = partial + (first + row) * given_x_row_floats(C::kDim);
      out[kGivenXHead + d] = sum;
      if (d == 0) *reinterpret_cast<GivenXHead*>(out) = {top, omega, omega_e, reference, wrong, value()};
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run(Feed<C>& feed, const Unit& u, const Unit& next) {
    if (u.first) feed.invalid |= others_miss_a_page(p.cache, u, threadIdx.x, C::kThreads);
    stream(feed, u, next);
    const bool wrong = __syncthreads_or(feed.invalid) || u.invalid;
    const int all = u.rows;  // once the last are published the first thread writes another unit over this one
    float* const partial = p.partials + int64_t{u.partial} * kBundleRows * given_x_row_floats(C::kDim);
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      float* const to = partial + n * kQuadRows * given_x_row_floats(C::kDim);
#pragma unroll
      for (int first = 0; first < kQuadRows; first += kPublished) {
        const int rows = min(kPublished, all - n * kQuadRows - first);
        if (rows > 0) publish(quad[n], to, first, rows, wrong);
      }
    }
  }
};

// q and x of a unit's rows, zeros behind the last.
template <class C>
__device__ __forceinline__ void stage_rows(BundleShared<C>& s, const Params& p, const Unit& u) {
  const int rows = u.rows <= kQuadRows ? kQuadRows : kBundleRows;
  for (int at = threadIdx.x; at < rows * C::kDim; at += C::kThreads) {
    const int row = at / C::kDim, d = at % C::kDim;
    float2 qx{0, 0};
    if (row < u.rows && d < p.dim) {
      const UnitRow from = row_of(p, u, row);
      const int64_t at_q = row_offset(p.q, u.batch, from.position, from.head) + d * p.q.stride[3];
      const int64_t at_x = row_offset(p.x, u.batch, from.position, from.head) + d * p.x.stride[3];
      const float x =
          p.solved_x ? p.solved_x[int64_t{u.number + row} * C::kDim + d] : load_as<float>(p.x.data, p.x.dtype, at_x);
      qx = {load_as<float>(p.q.data, p.q.dtype, at_q), x};
    }
    s.query_x[row][d] = qx;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, kBundleResident) bundle_kernel(const __grid_constant__ Params p) {
  auto& s = *reinterpret_cast<BundleShared<C>*>(dynamic_tiles);
  if (threadIdx.x == 0) {
    for (auto& ring : s.loaded) {
      for (Barrier& slot : ring) slot.init(kFillArrivals<C>);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_last_kernel();
  let_next_kernel_begin();
  const auto take_unit = [&](Unit& to) {
    to.local = -1;
    if (s.walk.left == 0) return;
    to = take(p, s.walk);
    record_row(p, to);
  };
  if (threadIdx.x < 32) {
    const Walk start = find_start(p, blockIdx.x);
    if (threadIdx.x == 0) {
      s.walk = start;
      take_unit(s.unit[0]);
    }
  }
  __syncthreads();
  Feed<C> feed{{s, static_cast<int>(threadIdx.x / 32)}};
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const Unit& u = s.unit[turn];
    const Unit& next = s.unit[turn ^ 1];
    if (u.local < 0) break;
    if (threadIdx.x == 0) take_unit(s.unit[turn ^ 1]);
    stage_rows(s, p, u);
    __syncthreads();
    if (u.rows <= kQuadRows) {
      BundlePass<C, 1>(s, p, u).run(feed, u, next);
    } else {
      BundlePass<C, 2>(s, p, u).run(feed, u, next);
    }
    feed.next_unit();
  }
}

}  // namespace lla::cuda::sm90::decode
