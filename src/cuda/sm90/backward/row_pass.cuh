// The kernel behind row_pass.hpp. A warpgroup owns 64 queries; they are the rows of every product.
//
// A step (64 keys): S = Q Kᵀ; E = X Kᵀ; B = G Vᵀ - Y Kᵀ, X and Y with low parts where they have; element by element the
// operand U, rounded to fp16, its rounded row sum kept; then the sum over keys, U K. Subtracting (row sum) x (mean key)
// at the end gives back what rounding took from the sum of U, which is zero in exact arithmetic.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/sm90/backward/pass_block.cuh"
#include "cuda/sm90/backward/row_pass.hpp"
#include "cuda/sm90/mma.cuh"
#include "cuda/tensor/backward/exponents.hpp"
#include "cuda/tensor/rows.cuh"
#include "cuda/tensor/rows_io.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::sm90 {

template <int kDim_, bool kSolve_>
struct RowPass {
  static constexpr int kDim = kDim_;
  static constexpr bool kSolve = kSolve_;
  static constexpr bool kTarget = !kSolve;  // t is wanted, too
  static constexpr int kKeys = 64;
  static constexpr int kTile = 64 * kDim;
  static constexpr int kTileBytes = kTile * 2;
  // Q is held in registers where six resident operands would leave no room for two tiles of keys and of values.
  static constexpr bool kQInRegisters = kSolve;
  static constexpr int kResident = kSolve ? 5 : 4;
  static constexpr bool kOperandsInRegisters = kDim == 64 && kSolve;
  // S, E and B have registers of their own, but for where t and dq take 128 of them: there B takes those of S once
  // these have become W.
  static constexpr bool kAllAtOnce = kDim == 64 || kSolve;
  static constexpr int kSlots = kDim == 64 ? 8 : kSolve ? 4 : 6;

  // Resident operands by place.
  static constexpr int kG = 0, kQ = 1, kXHigh = kSolve ? 1 : 2, kXLow = kXHigh + 1, kYHigh = 3, kYLow = 4;
  __host__ __device__ static constexpr int operand(int place) {
    if (place == kG) return kOpG;
    if (!kSolve && place == kQ) return kOpQ;
    if (place == kXHigh) return kOpXHigh;
    if (place == kXLow) return kOpXLow;
    return place == kYHigh ? kOpYHigh : kOpYLow;
  }
  __host__ __device__ static constexpr bool is_low(int place) { return place == kXLow || (kSolve && place == kYLow); }
  static constexpr int kLow = kSolve ? 2 : 1;  // how many of them are

  struct Shared {
    alignas(1024) __half resident[kPassWarpgroups][kResident][kTile];
    alignas(1024) __half slots[kSlots][kTile];
    PassBarriers<kSlots> barriers;
  };
};

struct RowBlock {
  QueryBlock block;
  KeyRange keys;
  TileRange tiles;
  int64_t query_row, key_row;  // of the first query, and of the sequence's first key
  int32_t copy_index;          // index of everything kept per key head

  __device__ __forceinline__ RowBlock(const RowPassParams& params, int64_t item) {
    block = block_of_item(params.shape, params.cu_q, params.cu_k, item);
    keys = visible_keys(params.shape, block, block.first_row, kBlockRows);
    tiles = tiles_of(keys, 64);
    const int32_t kv_head = block.head / params.shape.group;
    copy_index = kv_copy(params.shape, params.heads_kv, block.batch, kv_head);
    query_row = tensor::query_row(params.shape, block.batch, block.head, block.start_q, block.first_row);
    key_row = first_key_row(params.shape, copy_index, kv_head, block.start_k);
  }
  // Whether a warpgroup's rows have low parts; those that are not there have none.
  __device__ __forceinline__ bool low(const RowPassParams& params, int warpgroup) const {
    const int32_t row = block.first_row + warpgroup * kOperandRows;
    return row < block.length_q && params.low[operand_block(params.shape, block.batch, block.head, row)] != 0;
  }
};

template <class Config>
__device__ __forceinline__ void row_pass_producer(const RowPassParams& params, typename Config::Shared& shared,
                                                  const RowBlock& b) {
  bool low[kPassWarpgroups];
  int tiles = kPassWarpgroups * Config::kResident;
#pragma unroll
  for (int g = 0; g < kPassWarpgroups; ++g) {
    low[g] = b.low(params, g);
    if (!low[g]) tiles -= Config::kLow;
  }
  shared.barriers.resident.arrive_expecting(tiles * Config::kTileBytes);
#pragma unroll
  for (int g = 0; g < kPassWarpgroups; ++g) {
#pragma unroll
    for (int i = 0; i < Config::kResident; ++i) {
      if (Config::is_low(i) && !low[g]) continue;
      load_tile<Config::kDim>(shared.resident[g][i], &params.queries[Config::operand(i)], b.query_row + g * 64,
                              shared.barriers.resident);
    }
  }
  RingPosition<Config::kSlots> at;
  for (int32_t tile = b.tiles.begin; tile < b.tiles.end; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.barriers.empty[at.slot].wait(at.phase ^ 1);
      shared.barriers.full[at.slot].arrive_expecting(Config::kTileBytes);
      load_tile<Config::kDim>(shared.slots[at.slot], i == 0 ? &params.keys : &params.values, b.key_row + tile * 64,
                              shared.barriers.full[at.slot]);
      at.advance(1);
    }
  }
}

// What a thread needs of its two rows. With c in the sum, a and c are halved, because |a b - c| is at most 2, and
// lifted by what that bound is too large.
struct RowPair {
  float logit[2], shift[2], edge_a[2], edge_b[2], a0[2], b0[2], minus_c[2];
  int32_t begin[2], end[2];  // visible keys
};

// Row sums over the keys: of the operands of t and dq as they are rounded, of W a' and of W b'.
struct RowSums {
  float t[2] = {0, 0}, q[2] = {0, 0}, a[2] = {0, 0}, b[2] = {0, 0};
};

// Operands of 64 queries x 16 keys (those of column blocks 2 kStep and 2 kStep + 1), and the rounded row sums.
template <class Config, bool kMasked, int kStep>
__device__ __forceinline__ void row_pass_elements(uint32_t (&ut)[4], uint32_t (&uq)[4], RowSums& sum,
                                                  const uint32_t (&w)[16], const float (&e)[32], const float (&b)[32],
                                                  const RowPair& row, int32_t first_key) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 2 * kStep + i;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = unpack(w[2 * j + h]);
      float t[2], q[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t key = first_key + 8 * j + c;
        const bool visible = !kMasked || (key >= row.begin[h] && key < row.end[h]);
        const float weight = !visible ? 0.f : c == 0 ? pair.x : pair.y;
        const float a1 = fmaf(e[4 * j + 2 * h + c], row.edge_a[h], row.a0[h]);
        const float b1 = fmaf(b[4 * j + 2 * h + c], row.edge_b[h], row.b0[h]);
        if constexpr (Config::kSolve) sum.a[h] = fmaf(weight, a1, sum.a[h]);
        if constexpr (Config::kTarget) {
          t[c] = weight * b1;
          sum.b[h] += t[c];
          q[c] = t[c] * a1;
        } else {
          sum.b[h] = fmaf(weight, b1, sum.b[h]);
          q[c] = weight * fmaf(a1, b1, row.minus_c[h]);
        }
      }
      if constexpr (Config::kTarget) {
        ut[2 * i + h] = pack(t[0], t[1]);
        const float2 rounded = unpack(ut[2 * i + h]);
        sum.t[h] += rounded.x + rounded.y;
      }
      uq[2 * i + h] = Config::kSolve ? pack_saturated(q[0], q[1]) : pack(q[0], q[1]);
      const float2 rounded = unpack(uq[2 * i + h]);
      sum.q[h] += rounded.x + rounded.y;
    }
  }
}

// Half of a thread's pairs of two fp32 rows; zeros beyond `dim`.
template <int kDim>
__device__ __forceinline__ void load_half_rows(float (&to)[kDim / 4], const float* const (&row)[2], int half, int dim,
                                               int column) {
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    const int at = half * (kDim / 2) + 8 * (i / 2) + column;
    const float2 v = at < dim ? __ldg(reinterpret_cast<const float2*>(row[i & 1] + at)) : make_float2(0, 0);
    to[2 * i] = v.x, to[2 * i + 1] = v.y;
  }
}

// (sum (u k) in units of the scaled keys - (row sum) x (mean key)) scale, for half of the columns.
template <int kDim>
__device__ __forceinline__ void centre_half(float (&sums)[kDim / 2], const float (&mean)[kDim / 4], int half,
                                            const float (&row_sum)[2], float key_scale, const float (&scale)[2]) {
#pragma unroll
  for (int e = 0; e < kDim / 4; ++e) {
    float& sum = sums[half * (kDim / 4) + e];
    sum = fmaf(sum, key_scale, -row_sum[row_of(e)] * mean[e]) * scale[row_of(e)];
  }
}

// b0 - excess and a0 as the key pass shall have them. Where b of a heavy key is the small difference of b0 and B edge,
// the rounding of b0 - excess would show: of a few factors of `edge` next to one, which change nothing else that
// counts, the one is taken with which it rounds least.
__device__ __forceinline__ void move_mean(RowConstants& to, float b0, float excess, float a0, float one) {
  float least = INFINITY, best = b0 - excess, factor = 0;
  for (int j = -8; j <= 8; ++j) {
    const float f = static_cast<float>(j) * 0x1p-23f;
    const float moved = fmaf(b0, f, -excess), sum = b0 + moved, error = fabsf(moved - (sum - b0));
    if (error < least) least = error, best = sum, factor = f;
  }
  to.b0 = best;
  to.edge = fmaf(to.edge, factor, to.edge);
  to.a0 = fmaf(a0 - one, factor, a0);
}

// A thread's two rows; those that do not exist see nothing.
template <class Config>
__device__ __forceinline__ void read_row_pair(RowPair& row, const RowPassParams& params, const RowBlock& rb,
                                              int32_t first_row, int64_t saved_row, const Lane& lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t position = first_row + lane.row + 8 * h;
    RowConstants c{};
    KeyRange range{0, 0};
    if (position < rb.block.length_q) {
      c = params.rows[saved_row + 8 * h];
      range = visible_keys(params.shape, rb.block, position);
    }
    float factor = 1.f;
    if constexpr (Config::kSolve)
      factor = position < rb.block.length_q ? 0.5f * params.units[saved_row + 8 * h].lift : 1.f;
    row.logit[h] = c.logit, row.shift[h] = c.shift;
    row.edge_a[h] = factor * c.edge, row.edge_b[h] = c.edge;
    row.a0[h] = factor * c.a0, row.b0[h] = c.b0, row.minus_c[h] = factor * c.minus_c;
    row.begin[h] = range.begin, row.end[h] = range.end;
  }
}

// Q as the words a product takes.
template <class Config>
__device__ __forceinline__ void read_queries(uint32_t (&q)[Config::kDim / 4], const RowPassParams& params,
                                             const RowBlock& rb, int64_t saved_row, const Lane& lane) {
  const int64_t last = rb.query_row - rb.block.first_row + rb.block.length_q - 1;  // rows beyond it do not matter
#pragma unroll
  for (int k = 0; k < Config::kDim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t r = min(saved_row + 8 * (i & 1), last);
      q[4 * k + i] =
          *reinterpret_cast<const uint32_t*>(params.q + r * Config::kDim + 16 * k + 8 * (i >> 1) + lane.column);
    }
  }
}

// The queries' operands in products with keys and values: from registers, where there is room for them, they cost no
// reads of shared memory.
template <class Config>
struct RowOperands {
  using Left = LeftOperand<Config::kDim, Config::kOperandsInRegisters>;
  Left x, g, y;
  const __half *x_low, *y_low;

  __device__ __forceinline__ RowOperands(__half (&resident)[Config::kResident][Config::kTile], const Lane& lane)
      : x(resident[Config::kXHigh], lane),
        g(resident[Config::kG], lane),
        y(resident[Config::kSolve ? Config::kYHigh : Config::kG], lane),
        x_low(resident[Config::kXLow]),
        y_low(resident[Config::kSolve ? Config::kYLow : Config::kG]) {}
};

// E = X Kᵀ. Both ways commit themselves: a commit behind a branch would be a batch of its own to the assembler, and who
// waits for all batches but one would wait for E, too.
template <class Config>
__device__ __forceinline__ void issue_e(float (&e)[32], const RowOperands<Config>& operands, const __half* keys,
                                        bool low) {
  constexpr int kDim = Config::kDim;
  if (low) {
    keep_branch();  // not to be merged with the other way
    mma_fence();
    product_transposed<kDim, 64>(e, operands.x.words, keys);
    product_transposed<kDim, 64, true>(e, operands.x_low, keys);
    mma_commit();
  } else {
    mma_fence();
    product_transposed<kDim, 64>(e, operands.x.words, keys);
    mma_commit();
  }
}

// B = G Vᵀ - Y Kᵀ (Y carries the sign)
template <class Config>
__device__ __forceinline__ void issue_b(float (&b)[32], const RowOperands<Config>& operands, const __half* keys,
                                        const __half* values, bool low) {
  constexpr int kDim = Config::kDim;
  if (Config::kSolve && low) {
    keep_branch();
    mma_fence();
    product_transposed<kDim, 64>(b, operands.g.words, values);
    product_transposed<kDim, 64, true>(b, operands.y.words, keys);
    product_transposed<kDim, 64, true>(b, operands.y_low, keys);
    mma_commit();
  } else {
    mma_fence();
    product_transposed<kDim, 64>(b, operands.g.words, values);
    if constexpr (Config::kSolve) product_transposed<kDim, 64, true>(b, operands.y.words, keys);
    mma_commit();
  }
}

// W, E and B of a tile, whose weights are made while E and, where it can be, B are under way. Lets go of its values,
// which come behind its keys.
template <class Config, int kQWords>
__device__ __forceinline__ void row_pass_products(uint32_t (&w)[16], float (&e)[32], float (&b)[32],
                                                  typename Config::Shared& shared, int warpgroup,
                                                  const RingPosition<Config::kSlots>& at, const uint32_t (&q)[kQWords],
                                                  const RowOperands<Config>& operands, const RowPair& row, bool low) {
  constexpr int kDim = Config::kDim;
  const auto value_at = at.ahead(1);
  const __half* keys = shared.slots[at.slot];
  const __half* values = shared.slots[value_at.slot];
  float s[32];
  shared.barriers.full[at.slot].wait(at.phase);
  if constexpr (Config::kAllAtOnce) shared.barriers.full[value_at.slot].wait(value_at.phase);
  // S = Q Kᵀ
  mma_fence();
  if constexpr (Config::kQInRegisters) {
    product_transposed<kDim, 64>(s, q, keys);
  } else {
    product_transposed<kDim, 64>(s, shared.resident[warpgroup][Config::kQ], keys);
  }
  mma_commit();
  issue_e(e, operands, keys, low);
  if constexpr (Config::kAllAtOnce) issue_b(b, operands, keys, values, low);
  mma_wait<Config::kAllAtOnce ? 2 : 1>();
  pin(s);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int h = i & 1;
    w[i] = pack(exp2_fast(fmaf(s[2 * i], row.logit[h], row.shift[h])),
                exp2_fast(fmaf(s[2 * i + 1], row.logit[h], row.shift[h])));
  }
  pin(w);
  if constexpr (Config::kAllAtOnce) {
    // The assembler moves arithmetic past a wait for products, which then hides nothing, but not past a branch: this is
    // one. The tile is there and held, so nobody waits.
    shared.barriers.full[at.slot].wait(at.phase);
  } else {
    shared.barriers.full[value_at.slot].wait(value_at.phase);
    issue_b(b, operands, keys, values, low);
  }
  mma_wait<0>();
  pin(b);
  pin(e);
  shared.barriers.empty[value_at.slot].arrive_for_warp();
}

// 16 keys: t += (W b') K and dq += (W (a' b' - c')) K, which run while the next 16 are prepared.
template <class Config, int kStep, int kTargetSize>
__device__ __forceinline__ void row_pass_step(float (&target)[kTargetSize], float (&dq)[Config::kDim / 2], RowSums& sum,
                                              const uint32_t (&w)[16], const float (&e)[32], const float (&b)[32],
                                              const RowPair& row, int32_t first_key, bool whole, const __half* keys) {
  uint32_t ut[4], uq[4];
  if (whole) {
    row_pass_elements<Config, false, kStep>(ut, uq, sum, w, e, b, row, first_key);
  } else {
    row_pass_elements<Config, true, kStep>(ut, uq, sum, w, e, b, row, first_key);
  }
  if constexpr (Config::kTarget) pin(ut);
  pin(uq);
  mma_fence();
  if constexpr (Config::kTarget) product_step<Config::kDim, 64>(target, ut, keys, kStep);
  product_step<Config::kDim, 64>(dq, uq, keys, kStep);
  mma_commit();
}

// What the end of a row needs beside its sums.
struct RowEnd {
  int64_t at_row[2];
  RowUnits units[2];
  float inverse[2], scale_q[2], down[2];  // down: what undoes the halving and lifting
};
template <class Config>
__device__ __forceinline__ void read_row_end(RowEnd& end, RowSums& sum, const RowPassParams& params, const RowBlock& rb,
                                             const OwnRows& own_rows) {
  const int64_t row0 = rb.query_row - rb.block.first_row;
  end.at_row[0] = row0 + own_rows.row[0], end.at_row[1] = row0 + own_rows.row[1];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    end.units[h] = params.units[end.at_row[h]];
    end.inverse[h] = params.rows[end.at_row[h]].inverse * 0x1p-15f;
    sum.t[h] = quad_sum(sum.t[h]), sum.q[h] = quad_sum(sum.q[h]), sum.b[h] = quad_sum(sum.b[h]);
    if constexpr (Config::kSolve) sum.a[h] = quad_sum(sum.a[h]);
    end.down[h] = Config::kSolve ? 2.f * inverse_power_of_two(end.units[h].lift) : 1.f;
    end.scale_q[h] = end.units[h].scale * end.inverse[h] * end.down[h];
  }
}

// For the key pass, whose sums cannot see it: what rounding left of the sums of P b and dS over the keys, both zero.
template <class Config>
__device__ __forceinline__ void correct_constants(const RowPassParams& params, const RowEnd& end, const RowSums& sum,
                                                  const RowPair& row, const OwnRows& own_rows, const Lane& lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (lane.column != 0 || !own_rows.exists[h]) continue;
    RowConstants& to = params.rows[end.at_row[h]];
    const float one = end.units[h].one, inverse = end.inverse[h], down = end.down[h];
    const float excess = sum.b[h] * inverse;  // of P b'; moves b' ...
    const float c = excess * one;             // ... and so c', by the sum of P a' times it
    if constexpr (Config::kSolve) {
      const float a0 = down * (row.a0[h] - sum.a[h] * inverse) + one;
      move_mean(to, row.b0[h], excess, a0, one);
    } else {
      to.b0 = row.b0[h] - excess;
    }
    to.minus_c = Config::kSolve ? down * (row.minus_c[h] - sum.q[h] * inverse) + c : c - sum.q[h] * inverse;
    if (row.end[h] - row.begin[h] == 1 && finite(row.b0[h])) {  // one key: a is 1 and b is 0, to the last bit
      to.edge = to.b0 = to.minus_c = 0.f;
      to.a0 = one;
    }
  }
}

// t and dq from their sums: less (row sum) x (mean key), in their own units; dq also has y.
template <class Config, int kTargetSize>
__device__ __forceinline__ void finish_sums(float (&target)[kTargetSize], float (&dq)[Config::kDim / 2],
                                            const RowPassParams& params, const RowBlock& rb, const RowEnd& end,
                                            const RowSums& sum, float key_scale, bool shifted, const Lane& lane) {
  constexpr int kDim = Config::kDim;
  // Half of the columns at a time: all their reads are under way at once, and the registers are there.
  const float* const means[2] = {params.mean_k + end.at_row[0] * params.dim,
                                 params.mean_k + end.at_row[1] * params.dim};
  const float* const solved[2] = {params.y + end.at_row[0] * kDim, params.y + end.at_row[1] * kDim};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mean[kDim / 4], y[Config::kSolve ? kDim / 4 : 1];
    load_half_rows<kDim>(mean, means, half, params.dim, lane.column);
    if (Config::kSolve && shifted) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const int at = half * (kDim / 2) + 8 * (i / 2) + lane.column;
        const float2 c = __ldg(reinterpret_cast<const float2*>(params.key_shift + int64_t{rb.copy_index} * kDim + at));
        mean[2 * i] -= c.x, mean[2 * i + 1] -= c.y;
      }
    }
    if constexpr (Config::kSolve) load_half_rows<kDim>(y, solved, half, params.dim, lane.column);
    if constexpr (Config::kTarget) centre_half<kDim>(target, mean, half, sum.t, key_scale, end.inverse);
    centre_half<kDim>(dq, mean, half, sum.q, key_scale, end.scale_q);
    if constexpr (Config::kSolve) {
#pragma unroll
      for (int e = 0; e < kDim / 4; ++e) dq[half * (kDim / 4) + e] += y[e];
    }
    keep_order();
  }
  const PowerOfTwo of_dq[2] = {PowerOfTwo(end.units[0].dq_exponent), PowerOfTwo(end.units[1].dq_exponent)};
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) dq[e] = of_dq[row_of(e)] * dq[e];
  if constexpr (Config::kTarget) {
    const PowerOfTwo of_dx[2] = {PowerOfTwo(end.units[0].dx_exponent), PowerOfTwo(end.units[1].dx_exponent)};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) target[e] = of_dx[row_of(e)] * target[e];
  }
}

template <class Config>
__device__ __forceinline__ void row_pass_consumer(const RowPassParams& params, typename Config::Shared& shared,
                                                  const RowBlock& rb, int warpgroup) {
  constexpr int kDim = Config::kDim;
  const Lane lane(threadIdx.x % kWarpgroupThreads);
  const int32_t first_row = rb.block.first_row + warpgroup * 64;
  const int64_t saved_row = rb.query_row + warpgroup * 64 + lane.row;
  RowPair row;
  read_row_pair<Config>(row, params, rb, first_row, saved_row, lane);
  uint32_t q[Config::kQInRegisters ? kDim / 4 : 1];
  if constexpr (Config::kQInRegisters) read_queries<Config>(q, params, rb, saved_row, lane);

  float target[Config::kTarget ? kDim / 2 : 1], dq[kDim / 2];
  for (float& v : target) v = 0;
  for (float& v : dq) v = 0;
  RowSums sum;
  const KeyRange common = common_keys(params.shape, rb.block, first_row, 64);
  const bool all_rows = first_row + 64 <= rb.block.length_q;
  TileRange own = uniform(tiles_of(visible_keys(params.shape, rb.block, first_row, 64), 64));
  if (own.count() <= 0) own = {rb.tiles.begin, rb.tiles.begin};
  const bool low = uniform(rb.low(params, warpgroup)) != 0;

  shared.barriers.resident.wait(0);
  const RowOperands<Config> operands(shared.resident[warpgroup], lane);
  RingPosition<Config::kSlots> at;
  const auto pass_by = [&](int tiles) {  // seen by the other warpgroup only
    for (int i = 0; i < 2 * tiles; ++i) {
      shared.barriers.full[at.slot].wait(at.phase);
      shared.barriers.empty[at.slot].arrive_for_warp();
      at.advance(1);
    }
  };
  pass_by(own.begin - rb.tiles.begin);
  for (int32_t tile = own.begin; tile < own.end; ++tile) {
    float e[32], b[32];
    uint32_t w[16];
    row_pass_products<Config>(w, e, b, shared, warpgroup, at, q, operands, row, low);
    const int32_t first_key = tile * 64;
    const bool whole = all_rows && first_key >= common.begin && first_key + 64 <= common.end;
    const auto run = [&]<int kStep>() {
      row_pass_step<Config, kStep>(target, dq, sum, w, e, b, row, first_key + lane.column, whole,
                                   shared.slots[at.slot]);
    };
    run.template operator()<0>();
    run.template operator()<1>();
    run.template operator()<2>();
    run.template operator()<3>();
    mma_wait<0>();
    pin(target);
    pin(dq);
    shared.barriers.empty[at.slot].arrive_for_warp();
    at.advance(2);
  }
  pass_by(rb.tiles.end - own.end);

  const OwnRows own_rows(rb.block, first_row, lane);
  RowEnd end;
  read_row_end<Config>(end, sum, params, rb, own_rows);
  const float key_scale = 1.f / power_of_two_scale(__uint_as_float(params.heads[rb.copy_index].largest_key));
  const bool shifted = params.heads[rb.copy_index].marked & kShifted;
  correct_constants<Config>(params, end, sum, row, own_rows, lane);
  finish_sums<Config>(target, dq, params, rb, end, sum, key_scale, shifted, lane);
  const int own_warpgroup = thread_read_again() / kWarpgroupThreads - 1;
  named_sync(kWarpgroupBarrier + own_warpgroup, kWarpgroupThreads);  // the operands have been read by all
  __half* const stage = shared.resident[own_warpgroup][0];
  if constexpr (Config::kTarget) {
    if (params.dx.data != nullptr) store_output<kDim>(params.dx, target, params.dim, rb.block, first_row, lane, stage);
  }
  if (params.dq.data != nullptr) store_output<kDim>(params.dq, dq, params.dim, rb.block, first_row, lane, stage);
}

template <int kDim, bool kSolve>
__global__ void __launch_bounds__(kPassThreads, 1) row_pass_kernel(const __grid_constant__ RowPassParams params) {
  using Config = RowPass<kDim, kSolve>;
  auto& shared = *reinterpret_cast<typename Config::Shared*>(dynamic_tiles);
  const RowBlock block(params, blockIdx.x);
  if (block.block.empty()) return;
  run_pass_block(
      shared.barriers, [&] { row_pass_producer<Config>(params, shared, block); },
      [&](int warpgroup) { row_pass_consumer<Config>(params, shared, block, warpgroup); });
}

template <int kDim, bool kSolve>
Status launch_row_pass(const RowPassParams& params, cudaStream_t stream) {
  using Config = RowPass<kDim, kSolve>;
  constexpr size_t kShared = sizeof(typename Config::Shared);
  static_assert(kShared <= 227 * 1024);
  return launch(row_pass_kernel<kDim, kSolve>, params.shape.items(), kPassThreads, kShared, stream,
                "the gradient of queries", params);
}

}  // namespace lla::cuda::sm90
