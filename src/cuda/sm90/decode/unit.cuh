// What the converting warps do for one unit: the reference key, then stage after stage, then what is left over.
#pragma once

#include "cuda/sm90/decode/convert.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::sm90::decode {

template <class C>
struct UnitRun {
  Converter<C>& c;
  Shared<C>& s;
  const Params& p;
  const FetchedUnit& fetched;
  const Unit& u;
  const uint32_t base;  // position of the unit's first stage
  const Steps<C> steps;
  const int thread;

  __device__ __forceinline__ UnitRun(Converter<C>& converter, const FetchedUnit& unit, uint32_t first)
      : c(converter),
        s(converter.s),
        p(converter.p),
        fetched(unit),
        u(unit.unit),
        base(first),
        steps(unit),
        thread(converter.warp * 32 + converter.lane) {}

  __device__ __forceinline__ void wait(uint32_t position) const {
    s.loaded[stage_of<C>(position)].wait(parity_of<C>(position));
  }

  // The query, as it is.
  __device__ __forceinline__ void load_query() const {
    const uint16_t* const q = static_cast<const uint16_t*>(p.q.data);
    const int64_t at = row_offset(p.q, u.batch, u.position, u.head);
    if (thread < C::kDim) {
      const int d = thread, to = d / 16 * 16 + d % 8 / 2 * 4 + d % 16 / 8 * 2 + d % 2;
      reinterpret_cast<uint16_t*>(s.query)[to] = d < p.dim ? q[at + d * p.q.stride[3]] : 0;
    }
  }

  static constexpr int kFirstTiles = kReferenceKeys / kWarpKeys;
  __device__ __forceinline__ uint32_t seen_first(int tile) const {
    return seen_of(u.row, aligned(u.row.begin) + tile * kWarpKeys);
  }
  __device__ __forceinline__ unsigned char* first_rows(int tile) const {
    const int key = tile * kWarpKeys;
    return s.stage[stage_of<C>(base + key / C::kStageKeys)] + key % C::kStageKeys * 128;
  }
  // Largest over all converting warps of what each warp brings.
  __device__ __forceinline__ float over_warps(const float (&parts)[C::kWarps]) const {
    float all = parts[0];
#pragma unroll
    for (int w = 1; w < C::kWarps; ++w) all = fmaxf(all, parts[w]);
    return all;
  }

  // The reference key, maximum and scales, from the row's first keys: the same for all parts of a row. Warps take tiles
  // of sixteen.
  __device__ __forceinline__ void reference() {
#pragma unroll 1
    for (int tile = c.warp; tile < kFirstTiles; tile += C::kWarps) {
      const uint32_t seen = seen_first(tile);
      float logit[2] = {-INFINITY, -INFINITY};
      if (seen != 0) {
        wait(base + tile * kWarpKeys / C::kStageKeys);
        unsigned char* const rows = first_rows(tile);
        if (seen != 0xffffu) clear_rows<C, C::kPartBytes>({rows, rows + c.kValues}, seen);
        __syncwarp();
        uint32_t k[1][Converter<C>::kSteps][4];
        c.load(k, c.start_of(rows));
        c.logits(logit, k, seen);
      }
      if (c.lane % 4 == 0) {
        s.first_logit[tile * kWarpKeys + c.key_at(0)] = logit[0];
        s.first_logit[tile * kWarpKeys + c.key_at(1)] = logit[1];
      }
    }
    converters_sync<C>();
    // Without the heaviest: of equals the first.
    float own[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) own[j] = s.first_logit[32 * j + c.lane];
    const auto largest = [&] { return warp_max(fmaxf(fmaxf(own[0], own[1]), fmaxf(own[2], own[3]))); };
    const float top = largest();
    uint32_t heaviest = kReferenceKeys;
#pragma unroll
    for (int j = 3; j >= 0; --j) heaviest = own[j] == top && top > -INFINITY ? 32 * j + c.lane : heaviest;
    heaviest = __reduce_min_sync(0xffffffffu, heaviest);
#pragma unroll
    for (int j = 0; j < 4; ++j) own[j] = 32 * j + c.lane == heaviest ? -INFINITY : own[j];
    const float second = largest();
#pragma unroll 1
    for (int tile = c.warp; tile < kFirstTiles; tile += C::kWarps) {
      const unsigned char* const rows = first_rows(tile);
      const bool any = seen_first(tile) != 0;
      const int key = tile * kWarpKeys + c.lane % kWarpKeys;
      const float logit = s.first_logit[key];
      const float mine = key != heaviest && logit > -INFINITY ? exp2_fast(2 * (logit - second)) : 0;
      const float sum = warp_sum(c.lane < kWarpKeys ? mine : 0);
      if (c.lane == 0) s.first_sum[tile] = sum;
#pragma unroll 1
      for (int word = c.lane; word < C::kDim / 2; word += 32) {
        float2 column{0, 0};
#pragma unroll
        for (int i = 0; any && i < kWarpKeys; ++i) {
          const float w = __shfl_sync(0xffffffffu, mine, i);
          const float2 k = widen_pair<C::kBf16>(
              *reinterpret_cast<const uint32_t*>(rows + raw_offset<C::kPartBytes>(i, word / 4) + word % 4 * 4));
          if (w != 0) column.x = fmaf(w, k.x, column.x), column.y = fmaf(w, k.y, column.y);
        }
        s.first[tile][2 * word] = column.x, s.first[tile][2 * word + 1] = column.y;
      }
    }
    converters_sync<C>();
    if (thread < C::kDim) {
      float total = 0, weights = 0;
#pragma unroll
      for (int tile = 0; tile < kFirstTiles; ++tile) {
        total += s.first[tile][thread];
        weights += s.first_sum[tile];
      }
      s.centre[thread] = weights > 0 ? __bfloat162float(__float2bfloat16_rn(total / weights)) : 0;
    }
    converters_sync<C>();
    float largest_key = 0, largest_value = 0;
#pragma unroll 1
    for (int tile = c.warp; tile < kFirstTiles; tile += C::kWarps) {
      const unsigned char* const rows = first_rows(tile);
      const uint32_t seen = seen_first(tile);
      if (seen == 0) continue;
#pragma unroll 1
      for (int word = c.lane; word < C::kDim / 2; word += 32) {
        const float2 centre{s.centre[2 * word], s.centre[2 * word + 1]};
#pragma unroll
        for (int i = 0; i < kWarpKeys; ++i) {
          const unsigned char* const at = rows + raw_offset<C::kPartBytes>(i, word / 4) + word % 4 * 4;
          const float2 k = widen_pair<C::kBf16>(*reinterpret_cast<const uint32_t*>(at));
          const float2 v = widen_pair<C::kBf16>(*reinterpret_cast<const uint32_t*>(at + c.kValues));
          if (seen >> i & 1) {
            largest_key = fmaxf(largest_key, fmaxf(fabsf(k.x - centre.x), fabsf(k.y - centre.y)));
            largest_value = fmaxf(largest_value, fmaxf(fabsf(v.x), fabsf(v.y)));
          }
        }
      }
    }
    largest_key = warp_max(largest_key), largest_value = warp_max(largest_value);
    if (c.lane == 0) s.parts[0][c.warp] = largest_key, s.parts[1][c.warp] = largest_value;
    converters_sync<C>();
    if (thread == 0) {
      const float from_max = second > -INFINITY ? second : top > -INFINITY ? top : 0;
      // Scales to [2^-4, 2^-3): r reaches 2^11, so later elements may be 2^8 times larger.
      s.row = {static_cast<int>(ceilf(fmaxf(fminf(from_max, 1e6f), -1e6f))),
               tensor::power_of_two_scale(over_warps(s.parts[0])) * 0x1p-18f,
               tensor::power_of_two_scale(over_warps(s.parts[1])) * 0x1p-18f};
    }
    converters_sync<C>();
  }

  // What all stages need. The row's first keys, where they are another unit's, have been read then.
  __device__ __forceinline__ void prepare() {
    if (!fetched.known) {
      load_query();
      converters_sync<C>();
      reference();
    }
    const float smaller = 1.0f / (1 << (kRedoBits * fetched.redo));
    c.max = s.row.max, c.key_scale = s.row.key_scale * smaller, c.value_scale = s.row.value_scale * smaller;
    if (thread < C::kDim) reinterpret_cast<float*>(s.scaled_centre)[thread] = s.centre[thread] * c.key_scale;
    c.clear();
    converters_sync<C>();
    if (c.warp < steps.before) {
      static_assert(C::kWarps >= kReferenceKeys / C::kStageKeys);
      const int stage = stage_of<C>(base + c.warp);
      if (c.lane == 0) s.head[stage].flags = kNothing;
      __syncwarp();
      s.full[stage].arrive_for_warp();
    }
  }

  // Whether what is apart is too large for the scales.
  __device__ __forceinline__ bool too_large() const {
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

  // Sixteen bytes of row `row` of the unit's last stage, whose first piece takes the keys that were kept apart.
  __device__ __forceinline__ uint32_t last_position() const { return base + steps.before + steps.tiles; }
  __device__ __forceinline__ uint4& last_chunk(int row, int which, int chunk) const {
    return *reinterpret_cast<uint4*>(s.stage[stage_of<C>(last_position())] + which * c.kValues +
                                     raw_offset<C::kPartBytes>(row, chunk));
  }
  // Every warp brings its own, and zeros for the rows that are nobody's.
  __device__ __forceinline__ void bring_apart() const {
    static_assert(C::kWarps <= C::kPieceKeys);
    wait(last_position());
#pragma unroll 1
    for (int row = c.warp; row < C::kPieceKeys; row += C::kWarps) {
      const bool there = row == c.warp && c.heaviest > -INFINITY;
      if (c.lane < 2 * C::kChunks) {
        const int which = c.lane / C::kChunks, chunk = c.lane % C::kChunks;
        last_chunk(row, which, chunk) = there ? reinterpret_cast<const uint4*>(s.heaviest[row % C::kWarps][which])[chunk]
                                              : make_uint4(0, 0, 0, 0);
      }
    }
  }
  // All of them but the heaviest. By one warp.
  __device__ __forceinline__ void last_stage(int best) {
    const int stage = stage_of<C>(last_position());
    const bool there = c.lane < C::kWarps && c.lane != best && s.heaviest_logit[c.lane % C::kWarps] > -INFINITY;
    const uint32_t seen = __ballot_sync(0xffffffffu, there);
    if (best >= 0 && c.lane < 2 * C::kChunks) {
      last_chunk(best, c.lane / C::kChunks, c.lane % C::kChunks) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    c.template piece<false>(s.stage[stage], s.root[stage], seen);
    if (c.lane == 0) {
      StageHead& head = s.head[stage];
      head.max[0] = head.max[1] = c.max;
      head.flags = (steps.tiles == 0 ? kUnitBegins : 0) | kUnitEnds, head.partial = u.partial;
    }
    fence_async_proxy();
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    prepare();
#pragma unroll 1
    for (int tile = c.warp; tile < steps.tiles; tile += C::kWarps) {
      const uint32_t position = base + steps.before + tile;
      const int stage = stage_of<C>(position), first = u.start + tile * C::kStageKeys;
      const int begin = max(0, u.keys.begin - first), end = min(C::kStageKeys, u.keys.end - first);
      wait(position);
      if (begin > 0 || end < C::kStageKeys) clear_outside(stage, first);
      c.stage(stage, tile, begin, end, tile == 0 ? kUnitBegins : 0, u.partial);
    }
    if (c.lane == 0) s.heaviest_logit[c.warp] = c.heaviest;
    bring_apart();
    const bool large = named_any(kConverterBarrier, C::kConverters, too_large());
    const int best = heaviest_warp();
    if (c.warp == 0) last_stage(best);
    const float omega = warp_sum(c.lane % 4 == 0 ? c.omega : 0);
    if (c.lane == 0) s.parts[0][c.warp] = omega, s.warp_max[c.warp] = c.max;
    converters_sync<C>();
    publish(best, large);
    if (c.warp == 0) {
      __syncwarp();
      s.full[stage_of<C>(last_position())].arrive_for_warp();
    }
    converters_sync<C>();
  }
  __device__ __forceinline__ void clear_outside(int stage, int first) const {
#pragma unroll 1
    for (int from = 0; from < C::kStageKeys; from += kWarpKeys) {
      unsigned char* const rows = s.stage[stage] + from * 128;
      const uint32_t seen = seen_of(u.keys, first + from);
      if (seen != 0xffffu) clear_rows<C, C::kPartBytes>({rows, rows + c.kValues}, seen);
    }
    __syncwarp();
  }

  // What the partial has beside its products.
  __device__ __forceinline__ void publish(int best, bool large) {
    float* const partial = p.partials + int64_t{u.partial} * partial_floats(C::kDim);
    float* const vectors = partial + kPartialHead;
    const float logit = best < 0 ? 0 : s.heaviest_logit[best];
    const float whole = ceilf(fmaxf(fminf(logit, 1e6f), -1e6f));
    const float root = __half2float(__float2half_rn(exp2_fast(logit - whole + kRootExponent)));
    if (thread < C::kDim) {
      float key = 0, value = 0;
      if (best >= 0) {
        const float2 k = widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(s.heaviest[best][0])[thread]);
        const float2 v = widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(s.heaviest[best][1])[thread]);
        const float scaled = reinterpret_cast<const float*>(s.scaled_centre)[thread];
        const float centred = __half2float(__float2half_rn(fmaf(k.x, c.key_scale, -scaled)));
        key = __half2float(__float2half_rn(centred * root)) / root;  // as the others are rounded
        value = v.x;
      }
      vectors[thread] = s.centre[thread];
      vectors[C::kDim + thread] = key;
      vectors[2 * C::kDim + thread] = value;
    }
    if (thread == 0) {
      PartialHead& head = *reinterpret_cast<PartialHead*>(partial);
      int top = s.warp_max[0];
      for (int w = 1; w < C::kWarps; ++w) top = max(top, s.warp_max[w]);
      float sum = 0;
      for (int w = 0; w < C::kWarps; ++w) sum += four_to(max(s.warp_max[w] - top, -100)) * s.parts[0][w];
      head.omega_max = top;
      head.omega = sum;
      head.heaviest_max = static_cast<int>(whole);
      head.heaviest_omega = best < 0 ? 0 : root * root;
      head.key_scale = c.key_scale, head.value_scale = c.value_scale;
      head.invalid = *static_cast<const volatile int32_t*>(&fetched.missing) || u.invalid;
      head.again[2] = large;
      if (large) s.overflow = 1;
    }
  }
};

// All units of the block.
template <class C>
__device__ __forceinline__ void convert_units(Shared<C>& s, const Params& p, int thread) {
  Converter<C> converter(s, p, thread);
  uint32_t base = 0;
#pragma unroll 1
  for (int index = 0;; ++index) {
    const FetchedUnit& fetched = s.units[index & 1];
    s.taken[index & 1].wait((index / 2) & 1);
    if (fetched.unit.local < 0) break;
    UnitRun<C> unit(converter, fetched, base);
    unit.run();
    base += unit.steps.count();
    s.done[index & 1].arrive_for_warp();
  }
}

}  // namespace lla::cuda::sm90::decode
