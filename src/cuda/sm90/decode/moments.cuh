// The first of two passes for rows that share keys: of each row Σ w (k - c)(k - c)ᵀ and Σ w (k - c), for as many rows at
// once as there are registers for. The second pass has x and the values (given_x.cuh).
//
// Keys lie in shared memory as they came and are the right operand of the products for all rows. The left one,
// w (k - c), is made in registers by those who multiply it, in two parts of bf16, so that the sums are those of the
// exact keys to 2^-17: the second pass may take exact keys. Four warps fetch the keys and make the weights, from logits
// on the tensor cores. c is the mean of the first keys that all rows see. w is relative to an integer maximum of each
// row that follows only where a weight would become large: bf16 has fp32's range.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/given_x_rows.cuh"
#include "cuda/sm90/decode/multiply.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kWeighers = 4;        // warps, of sixteen keys each
inline constexpr int kRangeSlack = 16;     // bits in units of sqrt(w) that a logit may exceed the maximum by
inline constexpr int kNegligible = 20;     // what the sums may be behind a maximum before they follow
inline constexpr int kDisplacedKeys = 16;  // of a warp, of a unit

template <int kDim_, bool kSmallPages_>
struct MomentsConfig {
  static constexpr int kDim = kDim_, kChunks = kDim / 8;
  static constexpr bool kBf16 = true, kSmallPages = kSmallPages_, kFetchValues = false;
  static constexpr int kRows = moments_bundle(kDim);
  static constexpr int kRawSlots = kDim == 128 ? 8 : 16;  // stages
  static constexpr int kAhead = kRawSlots / 2;            // of them asked for before they are needed
  static constexpr int kBoxBytes = kTileKeys * 128;
  static constexpr int kStageBytes = kTileKeys * kDim * 2;
  static constexpr int kThreads = 256 + 32 * kWeighers;
};

template <class C>
struct MomentsShared {
  struct Head {
    int32_t max[kWeighers][C::kRows];  // what the weights of each sixteen keys are relative to
    int32_t flags, partial;
  };
  alignas(1024) unsigned char stage[C::kRawSlots][C::kStageBytes];
  alignas(1024) unsigned char extra[C::kStageBytes];  // first keys of the row, then those that were the heaviest
  alignas(16) float weights[C::kRawSlots + 1][C::kRows][kTileKeys];   // the last: of `extra`
  alignas(16) unsigned char apart[kWeighers][C::kRows][C::kDim * 2];  // the heaviest key of each warp
  Head head[C::kRawSlots + 1];
  float query[C::kRows][C::kDim];
  float centre[C::kDim];
  float columns[kWeighers][C::kDim];
  float tops[kWeighers][C::kRows];
  float apart_logit[kWeighers][C::kRows], omega[kWeighers][C::kRows];
  int32_t max[kWeighers][C::kRows];
  float displaced_logit[kWeighers][kDisplacedKeys];
  int32_t displaced_row[kWeighers][kDisplacedKeys];
  Unit unit;
  Walk walk;
  Barrier full[C::kRawSlots + 1], empty[C::kRawSlots], finished;
  Barrier loaded[kWeighers][C::kRawSlots], extra_loaded[kWeighers];

  __device__ __forceinline__ RawTile tile(int warp, int slot) {
    return {stage[slot] + warp * kWarpKeys * 128, nullptr};
  }
};
// What the ring sees for the first keys of a row.
template <class C>
struct FirstKeys {
  struct Config : C {
    static constexpr int kRawSlots = 1;
  };
  MomentsShared<C>& s;
  Barrier (*const loaded)[1] = reinterpret_cast<Barrier (*)[1]>(s.extra_loaded);
  __device__ __forceinline__ RawTile tile(int warp, int) { return {s.extra + warp * kWarpKeys * 128, nullptr}; }
};

__device__ __forceinline__ void weighers_sync() { named_sync(kConverterBarrier, 32 * kWeighers); }

// One of the warps that fetch keys and make weights.
template <class C>
struct Weigher {
  MomentsShared<C>& s;
  const Params& p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = threadIdx.x % 32 / 4;  // this thread's; those behind the last have nothing to do
  Ring<C, MomentsShared<C>> ring;
  FirstKeys<C> first_keys;
  Ring<typename FirstKeys<C>::Config, FirstKeys<C>> first_ring;
  uint32_t query[C::kDim / 16][2];
  Keys keys, common;
  float heaviest, omega;
  int max, displaced, rows;
  uint32_t units = 0;
  bool invalid;

  __device__ __forceinline__ Weigher(MomentsShared<C>& shared, const Params& params)
      : s(shared),
        p(params),
        ring{shared, static_cast<int>(threadIdx.x / 32 % 4)},
        first_keys{shared},
        first_ring{first_keys, static_cast<int>(threadIdx.x / 32 % 4)} {}

  __device__ __forceinline__ bool there() const { return row < C::kRows; }
  __device__ __forceinline__ bool live() const { return row < rows; }
  __device__ __forceinline__ static int key_at(int i) { return RowQuad<C>::key_at(i); }
  __device__ __forceinline__ int first_of(const Unit& u, int tile) const {
    return u.start + tile * kTileKeys + warp * kWarpKeys;
  }
  __device__ __forceinline__ static int tiles_of(const Unit& u) {
    return ::max(1, (u.keys.end - u.start + kTileKeys - 1) / kTileKeys);
  }
  __device__ __forceinline__ void ask(const Unit& u, int tile) {
    if (tile >= tiles_of(u)) return;
    s.empty[ring.asked % C::kRawSlots].wait(((ring.asked / C::kRawSlots) & 1) ^ 1);
    ring.ask(p, u, first_of(u, tile), u.keys, invalid);
  }

  // Half logits of this thread's row and four keys.
  __device__ __forceinline__ void logits(float (&logit)[4], const unsigned char* rows) const {
    float product[2][4]{};
    const uint32_t from = raw_start(rows);
#pragma unroll
    for (int i = 0; i < C::kDim / 16; ++i) {
      uint32_t k[4];
      load_matrices(k, raw_at<C::kBoxBytes>(from, i));
      const uint32_t left[4] = {query[i][0], 0, query[i][1], 0};
      warp_product<C::kBf16>(product[0], left, k[0], k[2]);
      warp_product<C::kBf16>(product[1], left, k[1], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) logit[i] = live() ? product[i / 2][i % 2] * p.half_scale : -INFINITY;
  }
  // Of the sixteen, by key number; rows that do not see one have -inf.
  __device__ __forceinline__ void mask(float (&logit)[4], int first, const Keys& seen) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + key_at(i) < seen.begin || first + key_at(i) >= seen.end) logit[i] = -INFINITY;
    }
  }
  __device__ __forceinline__ static float largest(const float (&logit)[4]) {
    return fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));
  }

  __device__ __forceinline__ void copy_key(unsigned char* to, const unsigned char* rows, int key) const {
    if (lane < C::kChunks) {
      reinterpret_cast<uint4*>(to)[lane] = *reinterpret_cast<const uint4*>(rows + raw_offset<C::kBoxBytes>(key, lane));
    }
  }
  // What was apart goes among the displaced keys.
  __device__ __forceinline__ void displace(int of_row, float logit) {
    if (lane < C::kChunks) {
      *reinterpret_cast<uint4*>(s.extra + warp * kWarpKeys * 128 + raw_offset<C::kBoxBytes>(displaced, lane)) =
          reinterpret_cast<const uint4*>(s.apart[warp][of_row])[lane];
    }
    if (lane == 0) s.displaced_logit[warp][displaced] = logit, s.displaced_row[warp][displaced] = of_row;
    ++displaced;
  }
  // The heaviest key of each row stays out of the products. Where there is little room left for those it displaces, a
  // key has to be much heavier to take its place.
  __device__ __forceinline__ void keep_apart(float (&logit)[4], const unsigned char* rows) {
    const int used = displaced - kDisplacedKeys / 2;
    const float margin = used < 0 ? 0 : static_cast<float>(1 << used);
    const float own = largest(logit);
    if (!__any_sync(0xffffffffu, own > heaviest + margin)) return;
    const float top = keys_max(own);
#pragma unroll 1
    for (int r = 0; r < C::kRows; ++r) {
      const float row_top = __shfl_sync(0xffffffffu, top, 4 * r), before = __shfl_sync(0xffffffffu, heaviest, 4 * r);
      if (!(row_top > before + margin)) continue;
      if (before > -INFINITY) {
        if (displaced >= kDisplacedKeys - C::kRows) continue;  // room for the end
        displace(r, before);
      }
      int key = 99;
#pragma unroll
      for (int i = 3; i >= 0; --i) key = row == r && logit[i] == row_top ? key_at(i) : key;
      key = __reduce_min_sync(0xffffffffu, key);
      __syncwarp();
      copy_key(s.apart[warp][r], rows, key);
      if (row == r) {
        heaviest = row_top;
#pragma unroll
        for (int i = 0; i < 4; ++i) logit[i] = key_at(i) == key ? -INFINITY : logit[i];
      }
    }
  }

  // Weights of sixteen keys, relative to this warp's maximum, which follows where one would be too large.
  __device__ __forceinline__ void weigh(const float (&logit)[4], int slot) {
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
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = exp2_fast(2 * (logit[i] - static_cast<float>(max)));
        omega += w[i];
      }
      float* const to = s.weights[slot][row] + warp * kWarpKeys;
      *reinterpret_cast<float2*>(to + key_at(0)) = {w[0], w[1]};
      *reinterpret_cast<float2*>(to + key_at(2)) = {w[2], w[3]};
      if (lane % 4 == 0) s.head[slot].max[warp][row] = max;
    }
  }

  // q, the keys each row sees, c and the first maximum.
  __device__ __forceinline__ void begin(const Unit& u) {
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
    first_ring.ask(p, u, first, common, invalid);
#pragma unroll 1
    for (int n = 0; n < C::kAhead; ++n) ask(u, n);
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
      query[i / 2][i % 2] = there() ? narrow_pair<C::kBf16>(q[0], q[1]) : 0;
    }
    const uint32_t seen = seen_of(common, first);
    const unsigned char* const rows = first_ring.take(seen).keys;
    float logit[4];
    logits(logit, rows);
    mask(logit, first, common);
    const float top = keys_max(largest(logit));
    if (there() && lane % 4 == 0) s.tops[warp][row] = top;
    for (int d = 2 * lane; d < C::kDim; d += 64) {
      float2 sum{0, 0};
      for (int key = 0; key < kWarpKeys; ++key) {  // those not seen are zeros
        const float2 k = widen_pair<C::kBf16>(
            *reinterpret_cast<const uint32_t*>(rows + raw_offset<C::kBoxBytes>(key, d / 8) + d % 8 * 2));
        sum.x += k.x, sum.y += k.y;
      }
      *reinterpret_cast<float2*>(&s.columns[warp][d]) = sum;
    }
    weighers_sync();
    const int count = ::max(1, ::min(common.end, aligned(common.begin) + kTileKeys) - common.begin);
    if (thread < C::kDim) {
      const float sum = (s.columns[0][thread] + s.columns[1][thread]) + (s.columns[2][thread] + s.columns[3][thread]);
      s.centre[thread] = __bfloat162float(__float2bfloat16_rn(sum / static_cast<float>(count)));
    }
    float start = 0;
    if (there()) {
      start = fmaxf(fmaxf(s.tops[0][row], s.tops[1][row]), fmaxf(s.tops[2][row], s.tops[3][row]));
    }
    if (!(start > -INFINITY)) start = 0;
    max = static_cast<int>(ceilf(fmaxf(fminf(start, 1e6f), -1e6f)));
    heaviest = -INFINITY, omega = 0, displaced = 0;
    for (int e = lane; e < kWarpKeys * C::kChunks; e += 32) {
      *reinterpret_cast<uint4*>(s.extra + warp * kWarpKeys * 128 +
                                raw_offset<C::kBoxBytes>(e % kWarpKeys, e / kWarpKeys)) = make_uint4(0, 0, 0, 0);
    }
    weighers_sync();
  }

  __device__ __forceinline__ void stream(const Unit& u, int partial) {
    const int tiles = tiles_of(u);
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      const int first = first_of(u, n), slot = ring.taken % C::kRawSlots;
      unsigned char* const rows = ring.take(seen_of(u.keys, first)).keys;
      const bool edge = first < common.begin || first + kWarpKeys > common.end;
      const uint32_t poisoned = edge ? clear_poisoned<C>(rows) : 0;
      float logit[4];
      logits(logit, rows);
      if (edge) {
        mask(logit, first, keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // a row that sees such a key is not finite
          if (logit[i] > -INFINITY && poisoned >> key_at(i) & 1) omega = NAN;
        }
      }
      keep_apart(logit, rows);
      weigh(logit, slot);
      if (lane == 0 && warp == 0) {
        s.head[slot].flags = (n == 0 ? kFresh : 0) | (n + 1 == tiles ? kEnd : 0);
        s.head[slot].partial = partial;
      }
      __syncwarp();
      s.full[slot].arrive_for_warp();
      ask(u, n + C::kAhead);
    }
    // Only the heaviest of all warps' stays apart; the others' and the displaced keys go through the products.
    if (there() && lane % 4 == 0) s.apart_logit[warp][row] = heaviest;
    weighers_sync();
#pragma unroll 1
    for (int r = 0; r < C::kRows; ++r) {
      if (warp != heaviest_warp(r) && s.apart_logit[warp][r] > -INFINITY) displace(r, s.apart_logit[warp][r]);
    }
    __syncwarp();
    float logit[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool mine = key_at(i) < displaced && there() && s.displaced_row[warp][key_at(i)] == row;
      logit[i] = mine ? s.displaced_logit[warp][key_at(i)] : -INFINITY;
    }
    weigh(logit, C::kRawSlots);
    if (lane == 0 && warp == 0) s.head[C::kRawSlots].partial = partial;
    fence_async_proxy();
    __syncwarp();
    s.full[C::kRawSlots].arrive_for_warp();
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
    if (there() && lane % 4 == 0) s.omega[warp][row] = sum, s.max[warp][row] = max;
    const bool wrong = named_any(kConverterBarrier, 32 * kWeighers, invalid) || u.invalid;
    const int thread = warp * 32 + lane;
#pragma unroll 1
    for (int r = 0; r < u.rows; ++r, partial += partial_floats(C::kDim, false)) {
      const int best = heaviest_warp(r);
      for (int d = thread; d < C::kDim; d += 32 * kWeighers) {
        float* const vectors = partial + kPartialHead;
        vectors[d] = s.centre[d];
        vectors[C::kDim + d] =
            best < 0 ? 0 : widen_pair<C::kBf16>(reinterpret_cast<const uint16_t*>(s.apart[best][r])[d]).x - s.centre[d];
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
    const int slot = ring.asked % C::kRawSlots;
    s.empty[slot].wait(((ring.asked / C::kRawSlots) & 1) ^ 1);
    if (lane == 0 && warp == 0) s.head[slot].flags = kStop;
    __syncwarp();
    s.full[slot].arrive_for_warp();
  }
};

template <int kColumns>
struct LeftFromRegisters;
template <>
struct LeftFromRegisters<64> {
  using Atom = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;
};
template <>
struct LeftFromRegisters<128> {
  using Atom = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;
};

// 64 rows of one row's sums, kBlock of them, in a warpgroup.
template <class C, int kRow, int kBlock, int kColumns>
struct MomentsTask {
  using Atom = typename LeftFromRegisters<kColumns>::Atom;
  static constexpr int kCount = kColumns / 2;
  float sums[kCount];
  float of_keys[2];  // Σ w (k - c) of columns g and g + 8 of this warp's sixteen, over this thread's keys
  float centre[2];
  uint32_t left[2][4];
  int sums_max, partial_max;

  __device__ __forceinline__ static int column() {
    return 64 * kBlock + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& x : sums) x *= factor;
    of_keys[0] *= factor, of_keys[1] *= factor;
  }
  // The sums follow a maximum far above theirs. Nothing is in flight.
  __device__ __forceinline__ float follow(int max, bool fresh) {
    if (fresh) sums_max = max;
    if (max > sums_max + kNegligible) {
      mma_wait<0>();
      pin(sums);
      scale(four_to(sums_max - max));
      sums_max = max;
    }
    return four_to(max - sums_max);
  }
  // The left operand of sixteen keys: w (k - c) of sixteen columns of each warp.
  __device__ __forceinline__ void convert(uint32_t stage, const float* weights, float factor, int step) {
    const int lane = threadIdx.x % 32, key = step * kWarpKeys + lane % 16;
    const int chunk = threadIdx.x / 32 % 4 * 2 + lane / 16;
    uint32_t raw[4];
    load_transposed(raw, stage + kBlock * C::kBoxBytes + key * 128 + (chunk ^ (key & 7)) * 16);
    const float* const from = weights + step * kWarpKeys + lane % 4 * 2;
    const float2 near = *reinterpret_cast<const float2*>(from), far = *reinterpret_cast<const float2*>(from + 8);
    // Raw words: keys 2t of column g, keys 2t + 8, and both again of column g + 8; the operand wants columns first.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 k = widen_pair<true>(raw[i]), w = i % 2 == 0 ? near : far;
      const float a = (k.x - centre[i / 2]) * (w.x * factor), b = (k.y - centre[i / 2]) * (w.y * factor);
      const int at = i % 2 * 2 + i / 2;
      left[0][at] = narrow_pair<true>(a, b);
      const float2 rounded = widen_pair<true>(left[0][at]);
      left[1][at] = narrow_pair<true>(a - rounded.x, b - rounded.y);
      of_keys[i / 2] += a + b;
    }
  }
  __device__ __forceinline__ void multiply(const detail::Operand& stage, int step, bool add) {
    constexpr int kFrom = kColumns == 64 ? kBlock * C::kBoxBytes / 16 : 0;
    const uint64_t keys = stage.at(step * 128 + kFrom);
    mma_fence();
    detail::issue_rs<Atom>(sums, left[0], keys, std::make_index_sequence<kCount>{},
                           add ? detail::ScaleOut::One : detail::ScaleOut::Zero);
    detail::issue_rs<Atom>(sums, left[1], keys, std::make_index_sequence<kCount>{});
    mma_commit();
  }
  // Into the row's partial, with (k - c) on both sides; and the sums start anew.
  __device__ __forceinline__ void add_to(float* partial, const float* all_centre, bool fresh) {
    constexpr ProductTile kTile = key_tile(C::kDim, kBlock, false);
    const float low = keys_sum(of_keys[0]), high = keys_sum(of_keys[1]);
    float out[kCount + 4];
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float2 c = *reinterpret_cast<const float2*>(&all_centre[kTile.first_column + 8 * i + threadIdx.x % 4 * 2]);
      out[4 * i] = fmaf(-low, c.x, sums[4 * i]), out[4 * i + 1] = fmaf(-low, c.y, sums[4 * i + 1]);
      out[4 * i + 2] = fmaf(-high, c.x, sums[4 * i + 2]), out[4 * i + 3] = fmaf(-high, c.y, sums[4 * i + 3]);
    }
    const bool first = threadIdx.x % 4 == 0;
    out[kCount] = first ? low : 0, out[kCount + 1] = 0, out[kCount + 2] = first ? high : 0, out[kCount + 3] = 0;
    flush(reinterpret_cast<float4*>(partial + partial_matrix(C::kDim) + kTile.from), out, fresh, sums_max, partial_max);
    of_keys[0] = of_keys[1] = 0;
  }
  __device__ __forceinline__ void finish(float* partial) const {
    if (threadIdx.x % 128 != 0) return;
    reinterpret_cast<PartialHead*>(partial)->matrix_max[key_tile(C::kDim, kBlock, false).warpgroup] = partial_max;
  }
};

// What a warpgroup multiplies: at head dimension 128 the first 64 rows of one row's sums and the others of the other's,
// which symmetry makes half as wide; at 64 all of two rows'.
template <class C, int kWarpgroup>
struct Tasks {
  static constexpr bool kWide = C::kDim == 128;
  static constexpr int kFirst = kWide ? kWarpgroup : 2 * kWarpgroup, kSecond = kWide ? 1 - kWarpgroup : kFirst + 1;
  MomentsTask<C, kFirst, 0, C::kDim> first;
  MomentsTask<C, kSecond, kWide ? 1 : 0, 64> second;
};

template <class C, int kWarpgroup>
__device__ __forceinline__ void form_moments(MomentsShared<C>& s, const Params& p) {
  using Both = Tasks<C, kWarpgroup>;
  Both tasks;
  define(tasks.first.sums);
  define(tasks.second.sums);
  uint32_t slot = 0, parity = 0, units = 0;
  int tiles = 0;
  bool fresh = true;
  const auto tile = [&](const unsigned char* stage, int at) {
    const auto& head = s.head[at];
    const uint32_t from = shared_address(stage);
    const detail::Operand operand(stage, C::kBoxBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const bool add = step > 0 || tiles > 0;
      const auto one = [&](auto& task, int row) {
        const float factor = task.follow(head.max[step][row], !add);
        mma_wait<1>();  // the task's last products have read their left operand
        pin(task.left[0]);
        pin(task.left[1]);
        task.convert(from, s.weights[at][row], factor, step);
        task.multiply(operand, step, add);
      };
      one(tasks.first, Both::kFirst);
      one(tasks.second, Both::kSecond);
    }
    mma_wait<0>();
    pin(tasks.first.sums);
    pin(tasks.second.sums);
    ++tiles;
  };
  const auto partial_of = [&](int index, int row) {
    return p.partials + int64_t{index + row} * partial_floats(C::kDim, false);
  };
  const auto add_to = [&](int index) {
    tasks.first.add_to(partial_of(index, Both::kFirst), s.centre, fresh);
    tasks.second.add_to(partial_of(index, Both::kSecond), s.centre, fresh);
    fresh = false;
    tiles = 0;
  };
  for (;;) {
    s.full[slot].wait(parity);
    const int flags = s.head[slot].flags, partial = s.head[slot].partial;
    if (flags & kStop) break;
    if (flags & kFresh) {
      fresh = true, tiles = 0;
      const auto begin = [&](auto& task) {
        task.centre[0] = s.centre[task.column()], task.centre[1] = s.centre[task.column() + 8];
        task.of_keys[0] = task.of_keys[1] = 0;
      };
      begin(tasks.first);
      begin(tasks.second);
    }
    tile(s.stage[slot], slot);
    s.empty[slot].arrive_for_warp();
    if (tiles == kRestart) add_to(partial);
    if (flags & kEnd) {
      s.full[C::kRawSlots].wait(units++ & 1);
      tile(s.extra, C::kRawSlots);
      add_to(partial);
      tasks.first.finish(partial_of(partial, Both::kFirst));
      tasks.second.finish(partial_of(partial, Both::kSecond));
      __syncwarp();
      s.finished.arrive_for_warp();
    }
    slot = slot + 1 == C::kRawSlots ? 0 : slot + 1;
    parity ^= slot == 0;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) moments_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  MomentsShared<C>& s = *reinterpret_cast<MomentsShared<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i <= C::kRawSlots; ++i) s.full[i].init(kWeighers * kWarpArrivals);
    for (int i = 0; i < C::kRawSlots; ++i) s.empty[i].init(8 * kWarpArrivals);
    s.finished.init(8 * kWarpArrivals);
    for (int i = 0; i < kWeighers * C::kRawSlots; ++i) s.loaded[0][i].init(1);
    for (int i = 0; i < kWeighers; ++i) s.extra_loaded[i].init(1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_last_kernel();
  let_next_kernel_begin();
  if (threadIdx.x < 128) {
    form_moments<C, 0>(s, p);
  } else if (threadIdx.x < 256) {
    form_moments<C, 1>(s, p);
  } else {
    Weigher<C>(s, p).run();
  }
}

}  // namespace lla::cuda::sm90::decode
