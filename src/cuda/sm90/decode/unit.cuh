// The warp that looks after units: before one is converted its query, reference key and scales, while the one before it
// still is; after that the keys that were kept apart, and what the partial has beside its products.
#pragma once

#include <type_traits>

#include "cuda/sm90/decode/convert.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::sm90::decode {

// The largest magnitudes of pairs.
template <bool kBf16>
struct Largest {
  using Pair = std::conditional_t<kBf16, __nv_bfloat162, __half2>;
  uint32_t pair = 0;

  template <int kCount, int kColumns>
  __device__ __forceinline__ void add(const uint32_t (&x)[kCount][kColumns][4]) {
    const auto of = [](const uint32_t& word) { return *reinterpret_cast<const Pair*>(&word); };
    Pair chains[4] = {of(pair), of(pair), of(pair), of(pair)};
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) chains[e] = __hmax2(chains[e], __habs2(of(x[m][i][e])));
      }
    }
    const Pair all = __hmax2(__hmax2(chains[0], chains[1]), __hmax2(chains[2], chains[3]));
    pair = *reinterpret_cast<const uint32_t*>(&all);
  }
  __device__ __forceinline__ float of_warp() const {
    const float2 wide = widen_pair<kBf16>(pair);
    return warp_max(fmaxf(wide.x, wide.y));
  }
};

template <class C>
struct UnitWarp {
  static constexpr int kFirstTiles = kReferenceKeys / kWarpKeys, kSteps = C::kDim / 16;

  Converter<C>& c;
  Shared<C>& s;
  const Params& p;
  const FetchedUnit& fetched;
  const Unit& u;
  UnitState<C>& state;
  const uint32_t base;  // position of the unit's first stage
  const Steps<C> steps;
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ UnitWarp(Converter<C>& converter, int index, uint32_t first)
      : c(converter),
        s(converter.s),
        p(converter.p),
        fetched(converter.s.units[index & 1]),
        u(fetched.unit),
        state(converter.s.state[index & 1]),
        base(first),
        steps(fetched) {}

  // The query, as it is.
  __device__ __forceinline__ void load_query() const {
    const uint16_t* const q = static_cast<const uint16_t*>(p.q.data);
    const int64_t at = row_offset(p.q, u.batch, u.position, u.head);
#pragma unroll
    for (int d = lane; d < C::kDim; d += 32) {
      const int to = d / 16 * 16 + d % 8 / 2 * 4 + d % 16 / 8 * 2 + d % 2;
      reinterpret_cast<uint16_t*>(state.query)[to] = d < p.dim ? q[at + d * p.q.stride[3]] : 0;
    }
    __syncwarp();
  }

  // Where the row's first keys lie, in tiles of sixteen.
  __device__ __forceinline__ unsigned char* first_rows(int tile) const {
    const int key = tile * kWarpKeys, stage = stage_of<C>(base) + key / C::kStageKeys;
    return s.stage[stage < C::kStages ? stage : stage - C::kStages] + key % C::kStageKeys * 128;
  }

  // The reference key, maximum and scales, from the row's first keys: the same for all parts of a row. One chain of
  // latencies that a block's first unit waits for: two tiles at a time, sums on the tensor cores, nothing divided twice.
  // Scales are those of the keys themselves, which are no smaller than half of their distances from the reference: they
  // may be loose, and nothing has to wait for it.
  __device__ __forceinline__ void reference() {
    c.unit = &state;
    const int begin = u.row.begin - aligned(u.row.begin), end = u.row.end - aligned(u.row.begin);
    const int tiles = min(kFirstTiles, (end + kWarpKeys - 1) / kWarpKeys);
    Largest<C::kBf16> largest_key, largest_value;
#pragma unroll 1
    for (int tile = 0; tile < kFirstTiles; tile += 2) {
      float logit[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if (tile < tiles) {
        wait_for(s, base + tile * kWarpKeys / C::kStageKeys);
        unsigned char* const first = first_rows(tile);
        const int from = tile * kWarpKeys;
        if (from < begin || from + 2 * kWarpKeys > end) {
#pragma unroll 1
          for (int i = 0; i < 2; ++i) {
            unsigned char* const at = first + i * kWarpKeys * 128;
            const uint32_t seen = seen_of(u.row, aligned(u.row.begin) + from + i * kWarpKeys);
            clear_rows<C, C::kPartBytes>({at, at + C::kValues}, seen);
          }
        }
        __syncwarp();
        const int upto = min(2 * kWarpKeys, end - from), start = max(0, begin - from);
        const uint32_t seen = (0xffffffffu >> (32 - upto)) & (0xffffffffu << start);
        uint32_t k[2][kSteps][4];
        c.load(k, c.start_of(first));
        c.logits(logit, k, seen);
        largest_key.add(k);
        c.load(k, c.start_of(first) + C::kValues);
        largest_value.add(k);
      }
      if (lane % 4 == 0) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s.first_logit[tile * kWarpKeys + c.key_at(j)] = logit[j];
      }
    }
    __syncwarp();
    // Without the heaviest: of equals the first.
    float own[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) own[j] = s.first_logit[32 * j + lane];
    const auto largest = [&] { return warp_max(fmaxf(fmaxf(own[0], own[1]), fmaxf(own[2], own[3]))); };
    const float top = largest();
    uint32_t heaviest = kReferenceKeys;
#pragma unroll
    for (int j = 3; j >= 0; --j) heaviest = own[j] == top && top > -INFINITY ? 32 * j + lane : heaviest;
    heaviest = __reduce_min_sync(0xffffffffu, heaviest);
#pragma unroll
    for (int j = 0; j < 4; ++j) own[j] = static_cast<uint32_t>(32 * j + lane) == heaviest ? -INFINITY : own[j];
    const float second = largest();
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      own[j] = own[j] > -INFINITY ? exp2_fast(2 * (own[j] - second)) : 0;
      s.first_logit[32 * j + lane] = own[j];  // weights from here on
      sum += own[j];
    }
    sum = warp_sum(sum);
    __syncwarp();
    const float inverse = sum > 0 ? 1 / sum : 0;
    // Means on the tensor cores: keys are the left operand, the columns of the right one the weights, all of them alike.
    float column[kSteps][4]{};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const float2* const from = reinterpret_cast<const float2*>(&s.first_logit[tile * kWarpKeys]) + lane % 4;
      const float2 near = from[0], far = from[4];
      const uint32_t weights[2] = {narrow_pair<C::kBf16>(near.x, near.y), narrow_pair<C::kBf16>(far.x, far.y)};
      const uint32_t start = c.start_of(first_rows(tile));
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {  // sixteen columns
        uint32_t k[4];                    // keys 0-7 and 8-15 of eight columns, and of the next eight
        load_transposed(k, c.at(start, 0, i));
        const uint32_t left[4] = {k[0], k[2], k[1], k[3]};
        warp_product<C::kBf16>(column[i], left, weights[0], weights[1]);
      }
    }
    if (lane % 4 == 0) {
      const auto rounded = [&](float x) { return __bfloat162float(__float2bfloat16_rn(x * inverse)); };
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        state.centre[16 * i + lane / 4] = rounded(column[i][0]);
        state.centre[16 * i + 8 + lane / 4] = rounded(column[i][2]);
      }
    }
    const float key = largest_key.of_warp(), value = largest_value.of_warp();
    if (lane == 0) {
      const float from_max = second > -INFINITY ? second : top > -INFINITY ? top : 0;
      state.row_max = static_cast<int>(ceilf(fmaxf(fminf(from_max, 1e6f), -1e6f)));
      // To [2^-4, 2^-3): r reaches 2^11, so later values may be 2^8 times larger, keys, which may be twice as far from
      // the reference, 2^7 times.
      state.row_key_scale = tensor::power_of_two_scale(key) * 0x1p-18f;
      state.row_value_scale = tensor::power_of_two_scale(value) * 0x1p-18f;
    }
    __syncwarp();
  }
  // The same, where the unit before has the same row.
  __device__ __forceinline__ void copy(const UnitState<C>& from) const {
    for (int i = lane; i < C::kDim / 4; i += 32) state.query[i] = from.query[i];
    for (int d = lane; d < C::kDim; d += 32) state.centre[d] = from.centre[d];
    if (lane == 0) {
      state.row_max = from.row_max;
      state.row_key_scale = from.row_key_scale, state.row_value_scale = from.row_value_scale;
    }
    __syncwarp();
  }

  // Before the unit is converted.
  __device__ __forceinline__ void prepare(const UnitState<C>& before) {
    if (fetched.known) {
      copy(before);
    } else {
      load_query();
      reference();
    }
    const auto smaller = [](int times) { return 1.0f / (1 << (kRedoBits * times)); };
    const float key_scale = state.row_key_scale * smaller(fetched.key_redo);
    for (int d = lane; d < C::kDim; d += 32) {
      reinterpret_cast<float*>(state.scaled_centre)[d] = state.centre[d] * key_scale;
    }
    if (lane == 0) state.key_scale = key_scale, state.value_scale = state.row_value_scale * smaller(fetched.redo);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < steps.before; ++i) {  // read, and not to be multiplied
      const int stage = stage_of<C>(base + i);
      if (lane == 0) s.head[stage].flags = kNothing;
      __syncwarp();
      s.full[stage].arrive_for_warp();
    }
  }

  // Of all; of equals the first; -1: no key at all.
  __device__ __forceinline__ int heaviest_warp() const {
    int best = -1;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      if (state.heaviest_logit[w] > top) top = state.heaviest_logit[w], best = w;
    }
    return best;
  }

  // When all converting warps have left it: the keys they kept apart, all but the heaviest, are the first piece of the
  // unit's last stage.
  __device__ __forceinline__ void finish() {
    static_assert(C::kWarps <= C::kPieceKeys);
    const uint32_t position = base + steps.before + steps.tiles;
    const int stage = stage_of<C>(position), best = heaviest_warp();
    int top = state.max[0];
    for (int w = 1; w < C::kWarps; ++w) top = max(top, state.max[w]);
    c.begin(state, top);
    const bool there = lane < C::kWarps && lane != best && state.heaviest_logit[lane % C::kWarps] > -INFINITY;
    const uint32_t seen = __ballot_sync(0xffffffffu, there);
    wait_for(s, position);
#pragma unroll 4
    for (int e = lane; e < C::kPieceKeys * 2 * C::kChunks; e += 32) {
      const int row = e / (2 * C::kChunks), which = e / C::kChunks % 2, chunk = e % C::kChunks;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (seen >> row & 1) x = reinterpret_cast<const uint4*>(state.heaviest[row % C::kWarps][which])[chunk];
      *reinterpret_cast<uint4*>(s.stage[stage] + which * C::kValues + raw_offset<C::kPartBytes>(row, chunk)) = x;
    }
    __syncwarp();
    c.template piece<false>(stage, 0, seen);
    const int32_t large = __reduce_or_sync(0xffffffffu, lane < C::kWarps ? state.large[lane % C::kWarps] : 0);
    if (lane == 0) {
      reinterpret_cast<PartialHead*>(p.partials + int64_t{u.partial} * partial_floats(C::kDim))->again[2] =
          large | fetched.key_redo << kTooLargeBits;
      if (large != 0) s.overflow = 1;
      StageHead& head = s.head[stage];
      head.max[0] = head.max[1] = c.max;
      head.flags = (steps.tiles == 0 ? kUnitBegins : 0) | kUnitEnds, head.partial = u.partial;
    }
    fence_async_proxy();
    __syncwarp();
    s.full[stage].arrive_for_warp();
    publish(best, warp_sum(lane % 4 == 0 ? c.omega : 0));
  }

  // What the partial has beside its products. `omega`: of the keys kept apart, relative to this warp's maximum.
  __device__ __forceinline__ void publish(int best, float omega) const {
    float* const partial = p.partials + int64_t{u.partial} * partial_floats(C::kDim);
    float* const vectors = partial + kPartialHead;
    const float logit = best < 0 ? 0 : state.heaviest_logit[best];
    const float whole = ceilf(fmaxf(fminf(logit, 1e6f), -1e6f));
    const float root = __half2float(__float2half_rn(exp2_fast(logit - whole + kRootExponent)));
#pragma unroll
    for (int d = lane; d < C::kDim; d += 32) {
      float key = 0, value = 0;
      if (best >= 0) {
        const float2 k = widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(state.heaviest[best][0])[d]);
        const float2 v = widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(state.heaviest[best][1])[d]);
        const float scaled = reinterpret_cast<const float*>(state.scaled_centre)[d];
        const float centred = __half2float(__float2half_rn(fmaf(k.x, state.key_scale, -scaled)));
        key = __half2float(__float2half_rn(centred * root)) / root;  // as the others are rounded
        value = v.x;
      }
      vectors[d] = state.centre[d];
      vectors[C::kDim + d] = key;
      vectors[2 * C::kDim + d] = value;
    }
    if (lane == 0) {
      PartialHead& head = *reinterpret_cast<PartialHead*>(partial);
      float sum = omega;
      for (int w = 0; w < C::kWarps; ++w) sum += four_to(max(state.max[w] - c.max, -100)) * state.omega[w];
      head.omega_max = c.max;
      head.omega = sum;
      head.heaviest_max = static_cast<int>(whole);
      head.heaviest_omega = best < 0 ? 0 : root * root;
      head.key_scale = state.key_scale, head.value_scale = state.value_scale;
      head.invalid = *static_cast<const volatile int32_t*>(&fetched.missing) || u.invalid;
    }
  }
};

// All units of the block.
template <class C>
__device__ __forceinline__ void look_after_units(Shared<C>& s, const Params& p) {
  Converter<C> converter(s, p, threadIdx.x % 32);
  uint32_t base = 0, base_before = 0;
  int last = kNoMore;
#pragma unroll 1
  for (int index = 0;; ++index) {
    const int slot = index & 1;
    s.taken[slot].wait((index / 2) & 1);
    const int local = s.units[slot].unit.local;
    if (local >= 0) UnitWarp<C>(converter, index, base).prepare(s.state[slot ^ 1]);
    __syncwarp();
    s.ready[slot].arrive_for_warp();
    if (index > 0) {  // the last unit's end, now that the beginning of the next is out of the way
      s.left[slot ^ 1].wait(((index - 1) / 2) & 1);
      if (last >= 0) UnitWarp<C>(converter, index - 1, base_before).finish();
      __syncwarp();
      s.done[slot ^ 1].arrive_for_warp();
    }
    if (local == kNoMore) break;
    last = local;
    base_before = base;
    if (local >= 0) base += Steps<C>(s.units[slot]).count();
  }
}

}  // namespace lla::cuda::sm90::decode
