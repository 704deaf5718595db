// What the converting warps do for one unit: the reference key, then tile after tile, then what is left over.
#pragma once

#include "cuda/sm90/decode/convert.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::sm90::decode {

template <class C>
__device__ __forceinline__ float query_element(const Params& p, const Unit& u, int d) {
  if (d >= p.dim) return 0;
  const int64_t at = row_offset(p.q, u.batch, u.position, u.head) + d * p.q.stride[3];
  const uint16_t bits = static_cast<const uint16_t*>(p.q.data)[at];
  return C::kBf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

template <class C>
struct UnitRun {
  Converter<C>& c;
  Shared<C>& s;
  const Params& p;
  const Unit& u;
  Ring<C, Shared<C>>& ring;
  bool invalid = false;

  __device__ __forceinline__ UnitRun(Converter<C>& converter, Ring<C, Shared<C>>& warp_ring, const Unit& unit)
      : c(converter), s(converter.s), p(converter.p), u(unit), ring(warp_ring) {}

  // Largest over all converting warps of what each warp brings.
  __device__ __forceinline__ float over_warps(float (&parts)[C::kWarps], float mine) {
    if (c.lane == 0) parts[c.warp] = mine;
    converters_sync<C>();
    float all = parts[0];
#pragma unroll
    for (int w = 1; w < C::kWarps; ++w) all = fmaxf(all, parts[w]);
    return all;
  }

  __device__ __forceinline__ int first_key(int tile) const {
    return u.start + tile * kTileKeys + (c.warp % 4) * kWarpKeys;
  }
  __device__ __forceinline__ int tiles() const { return max(0, u.keys.end - u.start + kTileKeys - 1) / kTileKeys; }
  // Empty ones, so that the next unit begins with the same warpgroup, whatever the block has done before.
  __device__ __forceinline__ int padding() const {
    constexpr int kAll = C::kConverterWarpgroups;
    return p.invariant ? (kAll - (tiles() + 1) % kAll) % kAll : 0;
  }
  // Of this warpgroup, where the block has done so many.
  __device__ __forceinline__ int first_tile(uint32_t tiles_done) const {
    return static_cast<int>((c.warpgroup + C::kConverterWarpgroups - tiles_done % C::kConverterWarpgroups) %
                            C::kConverterWarpgroups);
  }
  __device__ __forceinline__ void ask(int tile) {
    if (tile < tiles()) ring.ask(p, u, first_key(tile), u.keys, invalid);
  }
  // The warp's first keys, before them those for the reference key, unless that is known.
  __device__ __forceinline__ int reference_key() const { return aligned(u.row.begin) + c.warp * kWarpKeys; }
  __device__ __forceinline__ void ask_first(bool known, uint32_t tiles_done) {
    if (!known) ring.ask(p, u, reference_key(), u.row, invalid);
    ask(first_tile(tiles_done));
  }

  // The reference key, maximum and scales, from the row's first keys, sixteen a warp: the same for all parts of a row.
  // Needs the query in query_centre. Its tile is the next in the ring.
  __device__ void reference(uint32_t seen) {
    const RawTile raw = ring.take(seen);
    uint32_t unused[2 * C::kChunks];
    float logit[4];
    c.template logits<false>(logit, unused, raw.keys, seen);
    // Without the heaviest: of equals the first.
    const float top = over_warps(s.parts, Converter<C>::largest(logit));
    constexpr int kNone = 1 << 20;
    int key = kNone;
#pragma unroll
    for (int j = 3; j >= 0; --j) key = logit[j] == top && top > -INFINITY ? c.warp * kWarpKeys + c.key_at(j) : key;
    key = min(key, __shfl_xor_sync(0xffffffffu, key, 1));
    key = min(key, __shfl_xor_sync(0xffffffffu, key, 2));
    if (c.lane == 0) s.warp_max[c.warp] = key;
    converters_sync<C>();
    int heaviest = kNone;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) heaviest = min(heaviest, s.warp_max[w]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (c.warp * kWarpKeys + c.key_at(j) == heaviest) logit[j] = -INFINITY;
    }
    const float second = over_warps(s.more_parts, Converter<C>::largest(logit));
    float weight[4], sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      weight[j] = logit[j] > -INFINITY ? exp2_fast(2 * (logit[j] - second)) : 0;
      sum += weight[j];
    }
    sum = keys_sum(sum);
    float* const mine = s.scratch[c.warp];
#pragma unroll
    for (int i = 0; i < C::kChunks / 2; ++i) {
      uint32_t k[4];
      load_transposed(k, raw_at(raw_start(raw.keys), i));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 a = widen_pair<C::kBf16>(k[2 * h]), b = widen_pair<C::kBf16>(k[2 * h + 1]);
        const float column = keys_sum(weight[0] * a.x + weight[1] * a.y + weight[2] * b.x + weight[3] * b.y);
        if (c.lane % 4 == 0) mine[8 * (2 * i + h) + c.lane / 4] = column;
      }
    }
    if (c.lane == 0) s.parts[c.warp] = sum;
    converters_sync<C>();
    const int thread = c.warp * 32 + c.lane;
    if (thread < C::kDim) {
      float total = 0, weights = 0;
      for (int w = 0; w < C::kWarps; ++w) {
        total += s.scratch[w][thread];
        weights += s.parts[w];
      }
      s.centre[thread] = weights > 0 ? __bfloat162float(__float2bfloat16_rn(total / weights)) : 0;
    }
    converters_sync<C>();
    float largest_key = 0, largest_value = 0;
#pragma unroll
    for (int i = 0; i < C::kChunks / 2; ++i) {
      uint32_t k[4], v[4];
      load_transposed(k, raw_at(raw_start(raw.keys), i));
      load_transposed(v, raw_at(raw_start(raw.values), i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float centre = s.centre[8 * (2 * i + j / 2) + c.lane / 4];
        const float2 a = widen_pair<C::kBf16>(k[j]), b = widen_pair<C::kBf16>(v[j]);
        const int at = 2 * (j % 2);
        if (seen >> c.key_at(at) & 1) largest_key = fmaxf(largest_key, fabsf(a.x - centre));
        if (seen >> c.key_at(at + 1) & 1) largest_key = fmaxf(largest_key, fabsf(a.y - centre));
        largest_value = fmaxf(largest_value, fmaxf(fabsf(b.x), fabsf(b.y)));
      }
    }
    largest_key = keys_max(largest_key), largest_value = keys_max(largest_value);
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
      largest_key = fmaxf(largest_key, __shfl_xor_sync(0xffffffffu, largest_key, by));
      largest_value = fmaxf(largest_value, __shfl_xor_sync(0xffffffffu, largest_value, by));
    }
    largest_key = over_warps(s.parts, largest_key);
    largest_value = over_warps(s.more_parts, largest_value);
    // To [2^-4, 2^-3): r reaches 2^11, so later elements may be 2^8 times larger.
    c.key_scale = tensor::power_of_two_scale(largest_key) * 0x1p-18f;
    c.value_scale = tensor::power_of_two_scale(largest_value) * 0x1p-18f;
    const float from_max = second > -INFINITY ? second : top > -INFINITY ? top : 0;
    c.max = static_cast<int>(ceilf(fmaxf(fminf(from_max, 1e6f), -1e6f)));
    converters_sync<C>();
  }

  // The maximum all warps go on with.
  __device__ __forceinline__ void agree_on_maximum() {
    if (c.lane == 0) s.warp_max[c.warp] = c.max;
    converters_sync<C>();
    int top = c.max;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) top = max(top, s.warp_max[w]);
    c.omega *= four_to(c.max - top);
    c.max = top;
    converters_sync<C>();
  }

  // Whether what is apart is too large for the scales.
  __device__ __forceinline__ bool too_large() {
    bool bad = false;
    if (c.heaviest > -INFINITY) {
#pragma unroll 1
      for (int word = c.lane; word < C::kDim / 2; word += 32) {
        const float2 k = widen_pair<C::kBf16>(reinterpret_cast<const uint32_t*>(s.heaviest[c.warp][0])[word]);
        const float2 v = widen_pair<C::kBf16>(reinterpret_cast<const uint32_t*>(s.heaviest[c.warp][1])[word]);
        const float key = fmaxf(fabsf(k.x - s.centre[2 * word]), fabsf(k.y - s.centre[2 * word + 1])) * c.key_scale;
        const float value = fmaxf(fabsf(v.x), fabsf(v.y)) * c.value_scale;
        bad |= fmaxf(key, value) >= 31;
      }
    }
    return bad;
  }

  // All tiles of the part and the one that takes the warps' lesser heaviest keys. Returns whether one of those is too
  // large for the scales. `tiles_done`: of the block, so far; `fills`: of this warpgroup's stage.
  // The warpgroup's first tile is asked for already.
  __device__ bool stream(int partial, uint32_t tiles_done, uint32_t& fills) {
    const int tiles = this->tiles();
    const int own = first_tile(tiles_done);
    c.clear();
#pragma unroll 1
    for (int ahead = 1; ahead < C::kRawSlots; ++ahead) ask(own + C::kConverterWarpgroups * ahead);
    int tile = own;
#pragma unroll 1
    for (; tile < tiles; tile += C::kConverterWarpgroups) {
      const int chunk = tile / kRestart * kRestart;
      if (chunk > 0 && tile - chunk < C::kConverterWarpgroups && chunk + C::kConverterWarpgroups <= tiles)
        agree_on_maximum();
      const uint32_t seen = seen_of(u.keys, first_key(tile));
      c.template tile<true>(ring.take(seen), seen, (fills & 1) ^ 1, tile == 0 ? kFresh : 0, partial);
      ++fills;
      ask(tile + C::kConverterWarpgroups * C::kRawSlots);
    }
    if (c.lane == 0) s.heaviest_logit[c.warp] = c.heaviest;
    const bool large = named_any(kConverterBarrier, C::kConverters, too_large());
    const int padded = tiles + padding();
#pragma unroll 1
    for (; tile < padded; tile += C::kConverterWarpgroups) {
      c.template tile<false>(ring.take_empty(), 0, (fills & 1) ^ 1, tile == 0 ? kFresh : 0, partial);
      ++fills;
    }
    if (first_tile(tiles_done + padded) == 0) {
      const int best = heaviest_warp();
      const RawTile raw = ring.take_empty();  // nothing is in flight
      uint32_t seen = 0;
      if (c.warp % 4 == 0) {
        for (int w = 0; w < C::kWarps; ++w) {
          if (w == best || !(s.heaviest_logit[w] > -INFINITY)) continue;
          seen |= 1u << w;
          for (int which = 0; which < 2; ++which) {
            for (int word = c.lane; word < C::kDim / 2; word += 32) {
              *reinterpret_cast<uint32_t*>((which == 0 ? raw.keys : raw.values) + raw_offset(w, word / 4) +
                                           word % 4 * 4) =
                  reinterpret_cast<const uint32_t*>(s.heaviest[w][which])[word];
            }
          }
        }
        fence_async_proxy();
        __syncwarp();
      }
      c.template tile<false>(raw, seen, (fills & 1) ^ 1, (padded == 0 ? kFresh : 0) | kEnd, partial);
      ++fills;
    }
    return large;
  }

  // Of all; of equals the first; -1: no key at all.
  __device__ __forceinline__ int heaviest_warp() const {
    int best = -1;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      if (s.heaviest_logit[w] > top) top = s.heaviest_logit[w], best = w;
    }
    return best;
  }

  // The sum of weights of all warps, and what was kept apart, into the partial.
  __device__ void publish(float* partial) {
    const float omega = keys_sum(c.omega);
    if (c.lane == 0) s.parts[c.warp] = omega, s.warp_max[c.warp] = c.max;
    const bool wrong = named_any(kConverterBarrier, C::kConverters, invalid) || u.invalid;
    int top = s.warp_max[0];
    for (int w = 1; w < C::kWarps; ++w) top = max(top, s.warp_max[w]);
    const int thread = c.warp * 32 + c.lane;
    float* const vectors = partial + kPartialHead;
    const int best = heaviest_warp();
    const float logit = best < 0 ? 0 : s.heaviest_logit[best];
    const float whole = ceilf(fmaxf(fminf(logit, 1e6f), -1e6f));
    const float root = __half2float(__float2half_rn(exp2_fast(logit - whole + kRootExponent)));
    if (thread < C::kDim) {
      float key = 0, value = 0;
      if (best >= 0) {
        const float2 k = widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(s.heaviest[best][0])[thread]);
        const float2 v = widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(s.heaviest[best][1])[thread]);
        const float centred = __half2float(__float2half_rn(fmaf(k.x, c.key_scale, -s.query_centre[thread].y)));
        key = __half2float(__float2half_rn(centred * root)) / root;  // as the others are rounded
        value = v.x;
      }
      vectors[thread] = s.centre[thread];
      vectors[C::kDim + thread] = key;
      vectors[2 * C::kDim + thread] = value;
    }
    if (thread == 0) {
      PartialHead& head = *reinterpret_cast<PartialHead*>(partial);
      float sum = 0;
      for (int w = 0; w < C::kWarps; ++w) sum += four_to(s.warp_max[w] - top) * s.parts[w];
      head.omega_max = top;
      head.omega = sum;
      head.heaviest_max = static_cast<int>(whole);
      head.heaviest_omega = best < 0 ? 0 : root * root;
      head.key_scale = c.key_scale, head.value_scale = c.value_scale;
      head.invalid = wrong;
    }
    converters_sync<C>();
  }
};

// The n-th unit of the block from start to end; meanwhile the next one is taken and its first keys are asked for.
// `ahead`: that was done for this one. `tiles_done` and `fills` as in stream; `attempts` counts all of the block.
struct Ahead {
  bool asked = false, invalid = false;
};
template <class C>
__device__ __forceinline__ void take_unit(Shared<C>& s, const Params& p, Unit& to) {
  to.local = -1;
  if (s.walk.left == 0) return;
  to = take(p, s.walk);
  record_row(p, to);
}
template <class C>
__device__ __forceinline__ void run_unit(Converter<C>& c, Ring<C, Shared<C>>& ring, int n, Ahead& ahead,
                                         uint32_t& tiles_done, uint32_t& fills, uint32_t& attempts) {
  Shared<C>& s = c.s;
  const Params& p = c.p;
  const Unit& u = s.units[n % 2];
  Unit& next = s.units[(n + 1) % 2];
  UnitRun<C> run(c, ring, u);
  run.invalid = ahead.invalid;
  const int thread = c.warp * 32 + c.lane;
  const bool known = s.row.local == u.local;
  if (!ahead.asked) run.ask_first(known, tiles_done);
  if (u.first) run.invalid |= others_miss_a_page(p.cache, u, thread, C::kConverters);
  if (known) {
    c.key_scale = s.row.key_scale, c.value_scale = s.row.value_scale, c.max = s.row.max;
  } else {
    if (thread < C::kDim) s.query_centre[thread].x = query_element<C>(p, u, thread) * p.half_scale;
    converters_sync<C>();
    run.reference(seen_of(u.row, run.reference_key()));
    if (thread == 0) s.row = {u.local, c.max, c.key_scale, c.value_scale};
  }
#pragma unroll 1
  for (int redo = 0;; ++redo) {
    if (thread < C::kDim) s.query_centre[thread].y = s.centre[thread] * c.key_scale;
    if (thread == 0) s.overflow = 0;
    converters_sync<C>();
    const bool large = run.stream(u.partial, tiles_done, fills);
    tiles_done += run.tiles() + run.padding() + 1;
    if (thread == 0 && redo == 0) take_unit(s, p, next);
    run.publish(p.partials + int64_t{u.partial} * partial_floats(C::kDim));
    const uint32_t before = ring.asked;
    UnitRun<C> following(c, ring, next);
    ahead.asked = next.local >= 0;
    if (ahead.asked) following.ask_first(next.local == u.local, tiles_done);
    ahead.invalid = following.invalid;
    s.finished.wait(attempts++ & 1);
    if (!(large || s.overflow) || redo == kMostRedos) break;
    for (uint32_t i = before; i < ring.asked; ++i) ring.take(0xffffu);  // not yet
    c.key_scale *= 1.0f / (1 << kRedoBits);
    c.value_scale *= 1.0f / (1 << kRedoBits);
    converters_sync<C>();
    run.ask(run.first_tile(tiles_done));
  }
}

}  // namespace lla::cuda::sm90::decode
