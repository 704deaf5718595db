// A consumer warpgroup: 64 queries of a block in one pass over their keys, from the last one to the first.
//
// Nothing is known before a tile is seen, and nothing needs to be:
//  - W = fp16(2^15 exp2(logit - R)), R an integer a little above the row's largest logit so far. A row with a logit
//    beyond it gets a new R, and its sums a factor that is a power of two: exact.
//  - U = fp16(W fp16(E - c)), c the weighted mean of E over the row's first tile with visible keys. Any c is right:
//  what
//    it adds to Σ U v, Σ U mean_v takes off again.
//  - The row sums Σ W and Σ U come from the products themselves: a block of columns of ones follows each tile of
//  values.
// A saved vector needs the mean keys, too: a second pass over the keys, with the final R.
#pragma once

#include "cuda/sm90/given_x/shared.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/tensor/block.cuh"
#include "cuda/tensor/online.cuh"
#include "cuda/tensor/rows_io.cuh"
#include "cuda/tensor/weights.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct GivenXConsumer {
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys;
  using Vector = float[kDim / 2];
  using Sums = float[kDim / 2 + 4];  // a vector, then the same sum over ones: of rows r, r, r + 8, r + 8
  using Scores = float[kKeys / 2];
  using Words = uint32_t[kKeys / 4];

  GivenXShared<Config>& shared;
  const ForwardParams& params;
  const int warpgroup;
  uint32_t key_base = 0, value_base = 0;  // positions of the item's first tiles in their rings
  int parity = 0;                         // of the item

  __device__ __forceinline__ static Lane own_lane() { return Lane(threadIdx.x % kWarpgroupThreads); }
  __device__ __forceinline__ const GivenXTiles& tiles() const { return shared.warpgroup_tiles[warpgroup]; }
  __device__ __forceinline__ void sync_warpgroup() const {
    named_sync(kWarpgroupBarrier + warpgroup, kWarpgroupThreads);
  }
  __device__ __forceinline__ __half* keys_at(uint32_t position) const {
    return shared.keys[shared.key_ring.stage(position)];
  }
  __device__ __forceinline__ __half* values_at(uint32_t position) const {
    return shared.values[shared.value_ring.stage(position)];
  }
  __device__ __forceinline__ void skip_keys(uint32_t position) const {
    shared.key_ring.wait(position);
    shared.key_ring.release(position);
  }
  __device__ __forceinline__ void skip_tile(int i) const {
    skip_keys(key_base + i);
    shared.value_ring.wait(value_base + i);
    shared.value_ring.release(value_base + i);
  }

  __device__ __forceinline__ void visible(Pair<KeyRange>& keys, const Lane& lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      keys[r] = visible_keys(params.shape, int64_t{tiles().diagonal} + lane.row + 8 * r, tiles().length_k);
  }
  __device__ __forceinline__ void mask(Scores& scores, int i) const {
    const int key = (tiles().last - i) * kKeys;
    if (key >= tiles().unmasked.begin && key + kKeys <= tiles().unmasked.end) return;
    const Lane lane = own_lane();
    Pair<KeyRange> keys;
    visible(keys, lane);
    mask_scores<kKeys>(scores, keys, key, lane);
  }

  __device__ __forceinline__ void issue_scores(Scores& scores, uint32_t position) const {
    product_transposed<kDim, kKeys>(scores, shared.q[warpgroup], keys_at(position));
    mma_commit();
  }
  __device__ __forceinline__ void issue_e(Scores& e, uint32_t position) const {
    product_transposed<kDim, kKeys>(e, shared.x[warpgroup][0], keys_at(position));
    if constexpr (Config::kXTwoParts)
      product_transposed<kDim, kKeys, true>(e, shared.x[warpgroup][1], keys_at(position));
    mma_commit();
  }

  // Raw scores of a tile, with nothing else under way.
  __device__ __forceinline__ void score_tile(Scores& scores, int i) const {
    define(scores);
    shared.key_ring.wait(key_base + i);
    mma_fence();
    issue_scores(scores, key_base + i);
    mma_wait<0>();
    pin(scores);
    mask(scores, i);
  }
  // Tiles from i on that this warpgroup does not see; then the next item's come.
  __device__ __forceinline__ void skip_remaining(int i, int count) {
    for (; i < count; ++i) skip_tile(i);
    key_base += count;
    value_base += count;
  }

  // What was summed before a row's bound was raised.
  __device__ __forceinline__ static void scale_sums(Sums& values, Sums& products, const Pair<float>& factor) {
#pragma unroll
    for (int e = 0; e < kDim / 2 + 4; ++e) values[e] *= factor[row_of(e)], products[e] *= factor[row_of(e)];
  }

  // Σ W v and Σ U v. The registers of the scores take E next, and every batch of products hides arithmetic:
  //   E = x Kᵀ, W V: U is made while W V runs; the next tile's scores, U V: its W is made while U V runs.
  // Nothing is in flight when an iteration ends: products that cross the end of a loop make the compiler serialise all.
  __device__ __forceinline__ void attend(Sums& values, Sums& products, OnlineRows& rows) {
#pragma unroll
    for (int e = 0; e < kDim / 2 + 4; ++e) values[e] = products[e] = 0;
    const int count = uniform(tiles().count), begin = uniform(tiles().begin), end = uniform(tiles().end);
    int i = 0;
    for (; i < begin; ++i) skip_tile(i);
    if (i < end) {
      Scores scores;
      Scores& e = scores;  // E takes the registers of scores that have become W
      Words w, u;
      Pair<float> factor;
      score_tile(scores, i);
      rows.weigh<kKeys>(w, scores, factor);
      pin(w);
      const auto multiply = [&]() __attribute__((always_inline)) {
        shared.value_ring.wait(value_base + i);
        // E = x Kᵀ;  Σ W v += W V
        mma_fence();
        issue_e(e, key_base + i);
        product<kDim + 8, kKeys>(values, w, values_at(value_base + i));
        mma_commit();
        mma_wait<1>();
        pin(e);
        shared.key_ring.release(key_base + i);
        rows.multiply<kKeys>(u, e, w);
        pin(u);
      };
      for (; i + 1 < end; ++i) {
        multiply();
        shared.key_ring.wait(key_base + i + 1);
        // S = Q Kᵀ of the next tile;  Σ U v += U V of this one
        mma_fence();
        issue_scores(scores, key_base + i + 1);
        product<kDim + 8, kKeys>(products, u, values_at(value_base + i));
        mma_commit();
        mma_wait<1>();
        pin(scores);
        pin(w);
        mask(scores, i + 1);
        const bool raised = rows.weigh<kKeys>(w, scores, factor);
        pin(w);
        mma_wait<0>();
        pin(values);
        pin(products);
        shared.value_ring.release(value_base + i);
        if (raised) scale_sums(values, products, factor);
      }
      multiply();
      mma_fence();
      product<kDim + 8, kKeys>(products, u, values_at(value_base + i));
      mma_commit();
      mma_wait<0>();
      pin(values);
      pin(products);
      shared.value_ring.release(value_base + i);
      ++i;
    }
    skip_remaining(i, count);
  }

  // The same with U in two parts, one product after the other.
  __device__ __forceinline__ void attend_two_parts(Sums& values, Sums& products, OnlineRows& rows) {
    define(values);
    define(products);
    const int count = uniform(tiles().count), begin = uniform(tiles().begin), end = uniform(tiles().end);
    int i = 0;
    for (; i < begin; ++i) skip_tile(i);
    for (; i < end; ++i) {
      Scores scores;
      Scores& e = scores;  // as above
      Words w;
      Pair<float> factor;
      score_tile(scores, i);
      if (rows.weigh<kKeys>(w, scores, factor)) scale_sums(values, products, factor);
      pin(w);
      define(e);
      shared.value_ring.wait(value_base + i);
      mma_fence();
      issue_e(e, key_base + i);
      mma_wait<0>();
      pin(e);
      shared.key_ring.release(key_base + i);
      mma_fence();
      product<kDim + 8, kKeys>(values, w, values_at(value_base + i));
      mma_commit();
      mma_wait<0>();
      pin(values);
      rows.multiply_exactly<kKeys>(e, w);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        Words u;
        pack_scores<kKeys>(u, e);
        subtract_words<kKeys>(e, u);
        pin(u);
        mma_fence();
        product<kDim + 8, kKeys>(products, u, values_at(value_base + i));
        mma_commit();
        mma_wait<0>();
        pin(products);
      }
      shared.value_ring.release(value_base + i);
    }
    skip_remaining(i, count);
  }

  // Mean keys and the largest raw scores, once R is known. Weights that were shifted later may round differently here,
  // so their sum is taken again.
  __device__ __forceinline__ void mean_keys(Vector& keys, Pair<float>& largest, const RowLogits& logits) {
    Pair<float> omega = {0, 0};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) keys[e] = 0;
    largest[0] = largest[1] = -INFINITY;
    const int count = uniform(tiles().count), begin = uniform(tiles().begin), end = uniform(tiles().end);
    int i = 0;
    for (; i < begin; ++i) skip_keys(key_base + i);
    if (i < end) {
      Scores scores;
      Words w;
      define(scores);
      const auto weigh = [&]() __attribute__((always_inline)) {
        pin(scores);
        mask(scores, i);
#pragma unroll
        for (int e = 0; e < kKeys / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], scores[e]);
        exponentiate_scores<kKeys>(scores, logits);
      };
      shared.key_ring.wait(key_base + i);
      mma_fence();
      issue_scores(scores, key_base + i);
      mma_wait<0>();
      weigh();
      while (true) {
        pack_scores<kKeys>(w, scores);
        add_row_sums<kKeys>(omega, w);
        pin(w);
        if (i + 1 >= end) break;
        shared.key_ring.wait(key_base + i + 1);
        mma_fence();
        issue_scores(scores, key_base + i + 1);
        product<kDim, kKeys>(keys, w, keys_at(key_base + i));
        mma_commit();
        ++i;
        mma_wait<1>();
        weigh();
        mma_wait<0>();
        pin(keys);
        shared.key_ring.release(key_base + i - 1);
      }
      mma_fence();
      product<kDim, kKeys>(keys, w, keys_at(key_base + i));
      mma_commit();
      mma_wait<0>();
      pin(keys);
      shared.key_ring.release(key_base + i);
      ++i;
    }
    for (; i < count; ++i) skip_keys(key_base + i);
    key_base += count;
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = quad_max(largest[r]), omega[r] = quad_sum(omega[r]);
    const Pair<float> inverse = {reciprocal(omega[0]), reciprocal(omega[1])};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) keys[e] = divide(keys[e], omega[row_of(e)], inverse[row_of(e)]);
  }

  // Queries and x into shared memory, and what the pass needs to know of the item.
  __device__ __forceinline__ void begin(const ForwardItem& b, const HeadScales& head, OnlineRows& rows) {
    const Lane lane = own_lane();
    const int first_row = b.block.first_row + warpgroup * kWarpgroupRows;
    if (lane.thread == 0) {
      GivenXTiles& to = shared.warpgroup_tiles[warpgroup];
      const TileRange own = tiles_of(visible_keys(params.shape, b.block, first_row, kWarpgroupRows), kKeys);
      to.last = b.tiles.end - 1;
      to.count = b.tiles.count();
      to.begin = own.count() > 0 ? b.tiles.end - own.end : to.count;
      to.end = own.count() > 0 ? b.tiles.end - own.begin : to.count;
      to.unmasked = common_keys(params.shape, b.block, first_row, kWarpgroupRows);
      to.diagonal = first_row + b.block.length_k - b.block.length_q;
      to.length_k = b.block.length_k;
    }
    const RowLoader<kDim> queries(params.q, params.dim, b.block, first_row, lane.thread, shared.q[warpgroup]);
    const RowLoader<kDim, Config::kXTwoParts> x(params.x, params.dim, b.block, first_row, lane.thread,
                                                shared.x[warpgroup][0], shared.x[warpgroup][Config::kXTwoParts]);
    queries.fetch();
    x.fetch();
    queries.template write<false>(shared.q_scale[warpgroup], params.negative_scale ? -1.0f : 1.0f);
    x.template write<Config::kXTwoParts>(shared.x_scale[warpgroup], 1.0f);
    fence_async_proxy();
    sync_warpgroup();
    rows.start(power_of_two_below(kLargestX<kDim> * 2.001f * head.key_norm));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowScale q_scale = shared.q_scale[warpgroup][lane.row + 8 * r];
      rows.logits.scale[r] = fmaxf(params.scale_log2 / q_scale.or_one() / head.key, 1e-37f);
    }
  }

  __device__ __forceinline__ void run_item() {
    const Lane lane = own_lane();
    OnlineRows rows;
    Sums values, products;
    {
      const ForwardItem b(params, shared.item[parity], kKeys);
      begin(b, HeadScales(params, b.copy_index), rows);
    }
    if constexpr (Config::kFewKeys) {
      attend_two_parts(values, products, rows);
    } else {
      attend(values, products, rows);
    }

    const ForwardItem b(params, shared.item[parity], kKeys);
    const HeadScales head(params, b.copy_index);
    const OwnRows own_rows(b.block, b.block.first_row + warpgroup * kWarpgroupRows, lane);
    Pair<bool> bad;
    Pair<uint32_t> marks;
    Pair<KeyRange> keys;
    visible(keys, lane);
    marks_seen(marks, params, head, b.key_row, keys, lane);
    Pair<float> omega, sum, back, scale, key_scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowScale q_scale = shared.q_scale[warpgroup][lane.row + 8 * r],
                     x_scale = shared.x_scale[warpgroup][lane.row + 8 * r];
      bad[r] = (marks[r] & kNotFinite) || !q_scale.usable() || !x_scale.usable();
      omega[r] = values[kDim / 2 + 2 * r];
      sum[r] = products[kDim / 2 + 2 * r];
      const bool weighted = rows.e_scale > 0 && omega[r] > 0;
      back[r] = weighted ? 1.0f / x_scale.word / head.key / rows.e_scale / omega[r] : 0.0f;
      scale[r] = bad[r] ? NAN : 1.0f / head.value;
      key_scale[r] = bad[r] ? NAN : 1.0f / head.key;
    }
    const Pair<float> inverse = {reciprocal(omega[0]), reciprocal(omega[1])};
    // o = mean_v + (Σ U v - Σ U mean_v) / ω, in units of the scaled values.
    Vector mean, out;
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      mean[e] = divide(values[e], omega[r], inverse[r]);
      out[e] = fmaf(fmaf(-sum[r], mean[e], products[e]), back[r], mean[e]) * scale[r];
    }
    Pair<float> largest_output = {0, 0};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) largest_output[row_of(e)] = fmaxf(largest_output[row_of(e)], fabsf(out[e]));
#pragma unroll
    for (int r = 0; r < 2; ++r) largest_output[r] = quad_max(largest_output[r]);
    const int first_row = b.block.first_row + warpgroup * kWarpgroupRows;
    sync_warpgroup();  // x has been read by all
    store_output<kDim>(params.o, out, params.value_dim, b.block, first_row, lane, shared.x[warpgroup][0]);
    const bool save = params.saved.x != nullptr;
    Pair<float> largest;
    if (save) {
      save_rows(params.saved.mean_v, mean, params.value_dim, b.block, first_row, scale, lane);
      mean_keys(mean, largest, rows.logits);
      save_rows(params.saved.mean_k, mean, params.dim, b.block, first_row, key_scale, lane);
      save_x(b.block, own_rows, bad, lane);
    }
    if (lane.column != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!own_rows.exists[r]) continue;
      const int64_t index = row_index(params, b.block, own_rows.row[r]);
      if (save) {
        const float max = omega[r] > 0 ? ceilf(largest[r] * rows.logits.scale[r]) : 0.0f;
        params.saved.max[index] = bad[r] ? NAN : max;
        params.saved.omega[index] = bad[r] ? NAN : rows.above(omega[r], r, max);
      }
      if (params.info.iterations != nullptr) params.info.iterations[index] = -1;
      if (params.info.residual != nullptr) params.info.residual[index] = -1.0f;
      if (params.info.status != nullptr) {
        const bool outgrown = largest_output[r] >= least_infinite(params.o.dtype);
        params.info.status[index] = bad[r]                 ? LLA_ROW_NAN
                                    : marks[r] & kTooSmall ? LLA_ROW_PRECISION
                                    : outgrown             ? LLA_ROW_BREAKDOWN
                                                           : LLA_ROW_OK;
      }
    }
  }

  // Rows of a section of the saved vector. The vector is used up.
  __device__ __forceinline__ void save_rows(float* section, Vector& v, int dim, const QueryBlock& block, int first_row,
                                            const Pair<float>& scale, const Lane& lane) const {
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) v[e] *= scale[row_of(e)];
    store_output<kDim>(saved_rows(params.shape, section, dim), v, dim, block, first_row, lane, shared.x[warpgroup][0]);
  }

  __device__ __forceinline__ void save_x(const QueryBlock& block, const OwnRows& own_rows, const Pair<bool>& bad,
                                         const Lane& lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!own_rows.exists[r]) continue;
      const void* from = row_pointer(params.x, block.batch, int64_t{block.start_q} + own_rows.row[r], block.head);
      float* const to = params.saved.x + row_index(params, block, own_rows.row[r]) * params.dim;
      for (int column = lane.column * 4; column < params.dim; column += 32) {
        float x[8];
        load_eight(x, from, column, params.x);
#pragma unroll
        for (int j = 0; j < 8; ++j) to[column + j] = bad[r] ? NAN : x[j];
      }
    }
  }

  __device__ __forceinline__ void run() {
    for (uint32_t turn = 0;; ++turn) {
      parity = turn & 1;
      shared.item_full[parity].wait((turn >> 1) & 1);
      if (shared.item[parity] < 0) return;
      run_item();
      sync_warpgroup();
      shared.item_empty[parity].arrive_for_warpgroup();
    }
  }
};

}  // namespace lla::cuda::sm90
