// The warps of the first of two passes (moments.cuh) that fetch keys and make weights.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/bundle_rows.cuh"
#include "cuda/sm90/decode/moments_shared.cuh"

namespace lla::cuda::sm90::decode {

// One of the warps that fetch keys and make weights.
template <class C>
struct Weigher {
  MomentsShared<C>& s;
  const Params& p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = threadIdx.x % 32 / 4;  // this thread's; those behind the last have nothing to do
  Ring<C, MomentsShared<C>> ring;
  // Of columns 32 i on: the row's first sixteen, and in the operand's lower half, which is another row's otherwise, the
  // next sixteen.
  uint32_t query[C::kDim / 32][4];
  Keys keys, common;
  float heaviest, omega;
  int max, displaced, rows;   // displaced: of this thread's row
  uint32_t tiles_before = 0;  // of the block, all warps'
  uint32_t units = 0;
  bool invalid, few_keys, plain;  // plain: this thread's row

  __device__ __forceinline__ Weigher(MomentsShared<C>& shared, const Params& params)
      : s(shared), p(params), ring{shared, 0} {}

  __device__ __forceinline__ bool there() const { return row < C::kRows; }
  __device__ __forceinline__ bool live() const { return row < rows; }
  __device__ __forceinline__ static int key_at(int i) { return RowQuad<C>::key_at(i); }
  __device__ __forceinline__ static int tiles_of(const Unit& u) {
    return ::max(1, (u.keys.end - u.start + kMomentsKeys - 1) / kMomentsKeys);
  }
  // Whether one copy takes a tile: keys of a sequence lie together.
  __device__ __forceinline__ bool whole() const { return p.cache.box == kMomentsKeys && p.cache.vectors; }
  __device__ __forceinline__ void ask_for_whole(const Unit& u, int first, const unsigned char* to, Barrier& barrier) {
    if (elected()) {
      barrier.arrive_expecting(C::kStageBytes);
#pragma unroll
      for (int box = 0; box < C::kDim / 64; ++box) {
        load_box(shared_address(to) + box * C::kBoxBytes, &p.key_map, 64 * box, u.kv_head, first, u.batch, barrier);
      }
    }
    __syncwarp();
  }
  // A tile is one warp's, all of it: four of them are under way at a time.
  __device__ __forceinline__ void ask(const Unit& u, int n) {
    if (n >= tiles_of(u)) return;
    const uint32_t at = tiles_before + n;
    s.empty[at % C::kStages].wait(((at / C::kStages) & 1) ^ 1);
    if (whole()) {
      ask_for_whole(u, u.start + n * kMomentsKeys, s.stage[at % C::kStages], ring.barrier(at * C::kQuarters));
      return;
    }
    ring.asked = at * C::kQuarters;
#pragma unroll 1
    for (int i = 0; i < C::kQuarters; ++i) {
      ring.ask(p, u, u.start + n * kMomentsKeys + i * kWarpKeys, u.keys, invalid);
    }
  }

  // Half logits of this thread's row and four keys of sixteen.
  __device__ __forceinline__ void logits(float (&logit)[4], const unsigned char* rows_of_keys) const {
    float product[2][2][4]{};  // of even and of odd sixteens: half of each is of use
    const uint32_t from = raw_start(rows_of_keys);
#pragma unroll
    for (int i = 0; i < C::kDim / 16; ++i) {
      uint32_t k[4];
      load_matrices(k, raw_at<C::kBoxBytes>(from, i));
      warp_product<C::kBf16>(product[i % 2][0], query[i / 2], k[0], k[2]);
      warp_product<C::kBf16>(product[i % 2][1], query[i / 2], k[1], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = product[0][i / 2][i % 2] + product[1][i / 2][2 + i % 2];
      logit[i] = live() ? sum * p.half_scale : -INFINITY;
    }
  }
  // Rows that do not see a key have -inf.
  __device__ __forceinline__ void mask(float (&logit)[4], int first, const Keys& seen) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + key_at(i) < seen.begin || first + key_at(i) >= seen.end) logit[i] = -INFINITY;
    }
  }
  __device__ __forceinline__ static float largest(const float (&logit)[4]) {
    return fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));
  }
  __device__ __forceinline__ static float largest(const float (&logit)[C::kQuarters][4]) {
    return fmaxf(fmaxf(largest(logit[0]), largest(logit[1])), fmaxf(largest(logit[2]), largest(logit[3])));
  }

  // What was apart of a row goes among its displaced keys: `slot` of them.
  __device__ __forceinline__ void displace(int of_row, int slot, float logit) {
    const int at = of_row * C::kDisplaced + slot;
    if (lane < C::kChunks) {
      *reinterpret_cast<uint4*>(s.extra + warp * kWarpKeys * 128 + raw_offset<C::kBoxBytes>(at, lane)) =
          reinterpret_cast<const uint4*>(s.apart[warp][of_row])[lane];
    }
    if (lane == 0) s.displaced[warp][at] = logit;
  }
  // The heaviest key of each row stays out of the products. Where there is little room left for those it displaces, a
  // key has to be much heavier to take its place; there is always room for one more at the end.
  __device__ __forceinline__ void keep_apart(float (&logit)[C::kQuarters][4], const unsigned char* tile) {
    const float margin = displaced + 1 >= C::kDisplaced  ? INFINITY
                         : displaced < C::kDisplaced / 2 ? 0
                                                         : static_cast<float>(2 << (displaced - C::kDisplaced / 2));
    const float own = largest(logit);
    if (!__any_sync(0xffffffffu, own > heaviest + (heaviest > -INFINITY ? margin : 0))) return;
    const float top = keys_max(own);
    const bool exchanges = top > heaviest + (heaviest > -INFINITY ? margin : 0);
#pragma unroll 1
    for (int r = 0; r < C::kRows; ++r) {
      if (!__shfl_sync(0xffffffffu, exchanges, 4 * r)) continue;
      const float before = __shfl_sync(0xffffffffu, heaviest, 4 * r);
      const int slot = __shfl_sync(0xffffffffu, displaced, 4 * r);
      if (before > -INFINITY) displace(r, slot, before);
      int key = 99;
#pragma unroll
      for (int q = C::kQuarters - 1; q >= 0; --q) {
#pragma unroll
        for (int i = 3; i >= 0; --i) key = row == r && logit[q][i] == top ? q * kWarpKeys + key_at(i) : key;
      }
      key = __reduce_min_sync(0xffffffffu, key);
      __syncwarp();
      if (lane < C::kChunks) {
        reinterpret_cast<uint4*>(s.apart[warp][r])[lane] =
            *reinterpret_cast<const uint4*>(tile + raw_offset<C::kBoxBytes>(key, lane));
      }
      if (row == r) {
        if (before > -INFINITY) ++displaced;
        heaviest = top;
#pragma unroll
        for (int q = 0; q < C::kQuarters; ++q) {
#pragma unroll
          for (int i = 0; i < 4; ++i) logit[q][i] = q * kWarpKeys + key_at(i) == key ? -INFINITY : logit[q][i];
        }
      }
    }
  }

  // Largest over the warps of what each brings for this thread's row.
  __device__ __forceinline__ float over_warps(float (&parts)[kWeighers][C::kRows], float mine) const {
    if (there() && lane % 4 == 0) parts[warp][row] = mine;
    weighers_sync();
    const int r = there() ? row : 0;
    return fmaxf(fmaxf(parts[0][r], parts[1][r]), fmaxf(parts[2][r], parts[3][r]));
  }
  // Of each row c, the softmax-weighted mean of the first keys that all rows see, without the heaviest (of equals the
  // first), and the first maximum: the same for all parts of a row.
  __device__ __forceinline__ void reference(const unsigned char* rows_of_keys, int first) {
    float logit[4];
    logits(logit, rows_of_keys);
    mask(logit, first, common);
    const float top = over_warps(s.tops, keys_max(largest(logit)));
    float place = -INFINITY;  // the nearest is the largest
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      place = logit[i] == top && top > -INFINITY ? -static_cast<float>(warp * kWarpKeys + key_at(i)) : place;
    }
    place = over_warps(s.places, keys_max(place));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (-static_cast<float>(warp * kWarpKeys + key_at(i)) == place) logit[i] = -INFINITY;
    }
    const float second = over_warps(s.seconds, keys_max(largest(logit)));
    float sum = 0, sum_squared = 0;
    float* const weights = s.weights[C::kStages][there() ? row : 0] + warp * kWarpKeys;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float w = logit[i] > -INFINITY ? exp2_fast(2 * (logit[i] - second)) : 0;
      sum += w, sum_squared = fmaf(w, w, sum_squared);
      if (there()) weights[key_at(i)] = w;
    }
    sum = keys_sum(sum), sum_squared = keys_sum(sum_squared);
    if (there() && lane % 4 == 0) s.omega[warp][row] = sum, s.omega_squared[warp][row] = sum_squared;
    __syncwarp();
    float squares[C::kRows]{};
    for (int d = 2 * lane; d < C::kDim; d += 64) {
      float2 sums[C::kRows]{};
#pragma unroll 4
      for (int key = 0; key < kWarpKeys; ++key) {
        const float2 k = widen_pair<C::kBf16>(
            *reinterpret_cast<const uint32_t*>(rows_of_keys + raw_offset<C::kBoxBytes>(key, d / 8) + d % 8 * 2));
#pragma unroll
        for (int r = 0; r < C::kRows; ++r) {
          const float w = s.weights[C::kStages][r][warp * kWarpKeys + key];
          sums[r].x = fmaf(w, k.x, sums[r].x), sums[r].y = fmaf(w, k.y, sums[r].y);
          squares[r] = fmaf(w, fmaf(k.x, k.x, k.y * k.y), squares[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) *reinterpret_cast<float2*>(&s.columns[warp][r][d]) = sums[r];
    }
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      const float all = warp_sum(squares[r]);
      if (lane == 0) s.squares[warp][r] = all;
    }
    weighers_sync();
    for (int at = warp * 32 + lane; at < C::kRows * C::kDim; at += 32 * kWeighers) {
      const int r = at / C::kDim, d = at % C::kDim;
      const float all = (s.omega[0][r] + s.omega[1][r]) + (s.omega[2][r] + s.omega[3][r]);
      const float column = (s.columns[0][r][d] + s.columns[1][r][d]) + (s.columns[2][r][d] + s.columns[3][r][d]);
      s.centre[r][d] = all > 0 ? __bfloat162float(__float2bfloat16_rn(column / all)) : 0;
    }
    weighers_sync();
    if (warp < C::kRows) choose_way(warp);
    const float start = second > -INFINITY ? second : top > -INFINITY ? top : 0;
    max = there() ? static_cast<int>(ceilf(fmaxf(fminf(start, 1e6f), -1e6f))) : 0;
  }

  // How a row is multiplied, by its first keys. Where few of them have the weight, or it has few, what two parts lack is
  // not evened out over many: it has a third. Of the others, where the mean is no longer than the spread, nothing is
  // gained from taking it off: c is 0, the row plain, and its left operand takes half as many instructions.
  __device__ __forceinline__ void choose_way(int r) {
    float norm = 0;
    for (int d = lane; d < C::kDim; d += 32) norm = fmaf(s.centre[r][d], s.centre[r][d], norm);
    norm = warp_sum(norm);
    const auto all = [&](const float(&parts)[kWeighers][C::kRows]) {
      return (parts[0][r] + parts[1][r]) + (parts[2][r] + parts[3][r]);
    };
    const float omega_of_all = all(s.omega);
    const bool spread = !few_keys && omega_of_all * omega_of_all >= kSpreadKeys * all(s.omega_squared);
    const bool small = spread && norm * omega_of_all <= 0.5f * all(s.squares);
    if (small) {
      for (int d = lane; d < C::kDim; d += 32) s.centre[r][d] = 0;
    }
    if (lane == 0) s.plain[r] = small, s.precise[r] = !spread;
  }
  // Two weights as the consumers want them: of plain rows in two parts each.
  __device__ __forceinline__ void put_weights(float* to, float a, float b) const {
    float2 pair{a, b};
    if (plain) {
      const uint32_t high = narrow_pair<true>(a, b);
      const float2 rounded = widen_pair<true>(high);
      pair = {__uint_as_float(high), __uint_as_float(narrow_pair<true>(a - rounded.x, b - rounded.y))};
    }
    *reinterpret_cast<float2*>(to) = pair;
  }

  // q, the keys each row sees, c and the first maximum.
  __device__ __forceinline__ void begin(const Unit& u) {
    few_keys = u.row.end - u.row.begin <= kPreciseKeys;
    invalid = u.first && others_miss_a_page(p.cache, u, warp * 32 + lane, 32 * kWeighers);
    common = u.row;
#pragma unroll 1
    for (int r = 0; r < u.rows; ++r) {
      const Keys seen = row_of(p, u, r).keys;
      common = {::max(common.begin, seen.begin), ::min(common.end, seen.end)};
      if (r == row) keys = seen;
    }
    rows = u.rows;
    if (!live()) keys = {0, 0};
    const int thread = warp * 32 + lane, first = aligned(common.begin) + warp * kWarpKeys;
    FirstKeys<C> first_keys{s};
    Ring<typename FirstKeys<C>::Config, FirstKeys<C>> first_ring{first_keys, warp, units, units};
    if (whole()) {
      if (warp == 0) ask_for_whole(u, first, s.extra, s.first_loaded[0]);
    } else {
      first_ring.ask(p, u, first, common, invalid);
    }
#pragma unroll 1
    for (int n = warp; n < C::kAhead; n += kWeighers) ask(u, n);
    for (int at = thread; at < C::kRows * C::kDim; at += 32 * kWeighers) {
      const int r = at / C::kDim, d = at % C::kDim;
      float q = 0;
      if (r < u.rows && d < p.dim) {
        const UnitRow from = row_of(p, u, r);
        q = load_as<float>(p.q.data, p.q.dtype, row_offset(p.q, u.batch, from.position, from.head) + d * p.q.stride[3]);
      }
      s.query[r][d] = q;
    }
    weighers_sync();
#pragma unroll
    for (int i = 0; i < C::kDim / 8; ++i) {
      const float* const q = s.query[there() ? row : 0] + 8 * i + lane % 4 * 2;
      query[i / 4][i % 2 * 2 + i / 2 % 2] = there() ? narrow_pair<C::kBf16>(q[0], q[1]) : 0;
    }
    if (whole()) {
      s.first_loaded[0].wait(units & 1);
      first_ring.show(first_ring.tile(units), seen_of(common, first));
    } else {
      first_ring.take(seen_of(common, first));
    }
    reference(first_ring.tile(units).keys, first);
    weighers_sync();
    plain = s.plain[there() ? row : 0];
    heaviest = -INFINITY, omega = 0, displaced = 0;
    if (lane < kWarpKeys) s.displaced[warp][lane] = -INFINITY;
    for (int e = lane; e < kWarpKeys * C::kChunks; e += 32) {
      *reinterpret_cast<uint4*>(s.extra + warp * kWarpKeys * 128 +
                                raw_offset<C::kBoxBytes>(e % kWarpKeys, e / kWarpKeys)) = make_uint4(0, 0, 0, 0);
    }
    weighers_sync();
  }

  // Weights of one tile, relative to this warp's maximum, which follows where one would be too large.
  __device__ __forceinline__ void tile(const Unit& u, int n, int tiles, int partial) {
    const uint32_t at = tiles_before + n;
    const int slot = at % C::kStages, first = u.start + n * kMomentsKeys;
    const bool edge = first < common.begin || first + kMomentsKeys > common.end;
    ring.taken = at * C::kQuarters;
    if (whole()) ring.barrier(at * C::kQuarters).wait((at / C::kStages) & 1);
    unsigned char* const stage = s.stage[slot];
    float logit[C::kQuarters][4];
    if (edge) {
#pragma unroll 1
      for (int q = 0; q < C::kQuarters; ++q) {
        unsigned char* const rows_of_keys = stage + q * kWarpKeys * 128;
        const uint32_t seen = seen_of(u.keys, first + q * kWarpKeys);
        if (whole()) {
          ring.show({rows_of_keys, nullptr}, seen);
        } else {
          ring.take(seen);
        }
        const uint32_t poisoned = clear_poisoned<C>(rows_of_keys);
        float one[4];
        logits(one, rows_of_keys);
        mask(one, first + q * kWarpKeys, keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // a row that sees such a key is not finite
          if (one[i] > -INFINITY && poisoned >> key_at(i) & 1) omega = NAN;
#pragma unroll
          for (int to = 0; to < C::kQuarters; ++to) logit[to][i] = to == q ? one[i] : logit[to][i];
        }
      }
    } else {
      if (!whole()) {
#pragma unroll
        for (int q = 0; q < C::kQuarters; ++q) ring.take(0xffff);
      }
#pragma unroll
      for (int q = 0; q < C::kQuarters; ++q) logits(logit[q], stage + q * kWarpKeys * 128);
    }
    keep_apart(logit, stage);
    const float own = largest(logit);
    if (__any_sync(0xffffffffu, own > static_cast<float>(max + kRangeSlack))) {
      const float top = keys_max(own);
      if (top > static_cast<float>(max + kRangeSlack)) {
        const int higher = static_cast<int>(ceilf(fminf(top, 1e6f)));
        omega *= four_to(max - higher);
        max = higher;
      }
    }
    if (there()) {
      float* const to = s.weights[slot][row];
#pragma unroll
      for (int q = 0; q < C::kQuarters; ++q) {
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = exp2_fast(2 * (logit[q][i] - static_cast<float>(max)));
          omega += w[i];
        }
        put_weights(to + q * kWarpKeys + key_at(0), w[0], w[1]);
        put_weights(to + q * kWarpKeys + key_at(2), w[2], w[3]);
      }
      if (lane % 4 == 0) s.head[slot].max[row] = max;
    }
    if (lane == 0) {
      s.head[slot].flags = (n == 0 ? kFresh : 0) | (n + 1 == tiles ? kEnd : 0);
      s.head[slot].partial = partial;
    }
    // Keys that threads have stored: what the copy engine brings the products see without a fence.
    if (C::kSmallPages || !p.cache.vectors) fence_async_proxy();
    __syncwarp();
    s.full[slot].arrive_for_warp();
  }

  __device__ __forceinline__ void stream(const Unit& u, int partial) {
    const int tiles = tiles_of(u);
#pragma unroll 1
    for (int n = warp; n < tiles; n += kWeighers) {
      tile(u, n, tiles, partial);
      ask(u, n + C::kAhead);
    }
    tiles_before += tiles;
    // Only the heaviest of all warps' stays apart; the others' and the displaced keys go through the products, relative
    // to the largest of the warps' maxima.
    if (there() && lane % 4 == 0) s.apart_logit[warp][row] = heaviest, s.max[warp][row] = max;
    weighers_sync();
#pragma unroll 1
    for (int r = 0; r < C::kRows; ++r) {
      const int slot = __shfl_sync(0xffffffffu, displaced, 4 * r);
      if (warp != heaviest_warp(r) && s.apart_logit[warp][r] > -INFINITY) displace(r, slot, s.apart_logit[warp][r]);
    }
    __syncwarp();
    if (there()) {
      int top = s.max[0][row];
      for (int w = 1; w < kWeighers; ++w) top = ::max(top, s.max[w][row]);
      float* const to = s.weights[C::kStages][row] + warp * kWarpKeys;
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float logit = key_at(i) / C::kDisplaced == row ? s.displaced[warp][key_at(i)] : -INFINITY;
        omega += exp2_fast(2 * (logit - static_cast<float>(max)));
        w[i] = exp2_fast(2 * (logit - static_cast<float>(top)));
      }
      put_weights(to + key_at(0), w[0], w[1]);
      put_weights(to + key_at(2), w[2], w[3]);
      if (warp == 0 && lane % 4 == 0) s.head[C::kStages].max[row] = top;
    }
    fence_async_proxy();
    __syncwarp();
    s.full[C::kStages].arrive_for_warp();
  }

  // Of all; of equals the first; -1: no key at all.
  __device__ __forceinline__ int heaviest_warp(int r) const {
    int best = -1;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWeighers; ++w) {
      if (s.apart_logit[w][r] > top) top = s.apart_logit[w][r], best = w;
    }
    return best;
  }

  // Weights and what was kept apart, into the rows' partials.
  __device__ __forceinline__ void publish(const Unit& u, float* partial) {
    const float sum = keys_sum(omega);
    if (there() && lane % 4 == 0) s.omega[warp][row] = sum;
    const bool wrong = named_any(kConverterBarrier, 32 * kWeighers, invalid) || u.invalid;
    const int thread = warp * 32 + lane;
#pragma unroll 1
    for (int r = 0; r < u.rows; ++r, partial += partial_floats(C::kDim, false)) {
      const int best = heaviest_warp(r);
      for (int d = thread; d < C::kDim; d += 32 * kWeighers) {
        float* const vectors = partial + kPartialHead;
        vectors[d] = s.centre[r][d];
        vectors[C::kDim + d] =
            best < 0 ? 0
                     : widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(s.apart[best][r])[d]).x - s.centre[r][d];
      }
      if (thread != 0) continue;
      int top = s.max[0][r];
      for (int w = 1; w < kWeighers; ++w) top = ::max(top, s.max[w][r]);
      float all = 0;
      for (int w = 0; w < kWeighers; ++w) all += four_to(s.max[w][r] - top) * s.omega[w][r];
      const float logit = best < 0 ? 0 : s.apart_logit[best][r];
      const float whole = ceilf(fmaxf(fminf(logit, 1e6f), -1e6f));
      PartialHead& head = *reinterpret_cast<PartialHead*>(partial);
      head.omega_max = top, head.omega = all;
      head.heaviest_max = static_cast<int>(whole);
      head.heaviest_omega = best < 0 ? 0 : exp2_fast(2 * (logit - whole));
      head.key_scale = head.value_scale = 1;
      head.invalid = wrong;
    }
    s.finished.wait(units++ & 1);
    weighers_sync();
  }

  __device__ __forceinline__ void run() {
    if (warp == 0) {
      const Walk start = find_start(p, blockIdx.x);
      if (lane == 0) s.walk = start;
    }
    for (;;) {
      if (warp == 0 && lane == 0) {
        s.unit.local = -1;
        if (s.walk.left > 0) {
          s.unit = take(p, s.walk);
          record_row(p, s.unit);
        }
      }
      weighers_sync();
      const Unit& u = s.unit;
      if (u.local < 0) break;
      const int partial = u.partial * C::kRows;
      begin(u);
      stream(u, partial);
      publish(u, p.partials + int64_t{partial} * partial_floats(C::kDim, false));
    }
    if (warp != 0) return;
    const int slot = tiles_before % C::kStages;
    s.empty[slot].wait(((tiles_before / C::kStages) & 1) ^ 1);
    if (lane == 0) s.head[slot].flags = kStop;
    __syncwarp();
    s.full[slot].arrive_for_warp();
  }
};

}  // namespace lla::cuda::sm90::decode
