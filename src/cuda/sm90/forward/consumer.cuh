// A multiplying warpgroup: 64 queries of a block through all passes over their keys.
//   1. largest logits (scores)                     -> integer bound M
//   2. means (scores, W K, W V)                    -> ω, mean key, mean value; cached weights
//   3. conjugate gradients (scores, P Kᵀ, U K)     -> x; without the scores when weights are cached
//   4. output (scores, x Kᵀ high and low, S V)     -> o
#pragma once

#include "cuda/sm90/cg.cuh"
#include "cuda/sm90/forward/block.cuh"
#include "cuda/sm90/forward/rows_io.cuh"
#include "cuda/sm90/forward/shared.cuh"
#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/weights.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Consumer {
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys;
  using Cache = WeightCache<kKeys>;
  using Vector = float[kDim / 2];
  using Scores = float[kKeys / 2];
  using Words = uint32_t[kKeys / 4];

  ForwardShared<Config>& s;
  const ForwardParams& p;
  const int group;
  uint32_t base = 0;       // position of the next pass
  uint32_t decisions = 0;  // published so far
  int parity = 0;          // of the item
  RowLogits rows;

  __device__ __forceinline__ static Lane own_lane() { return Lane(threadIdx.x % kWarpgroup); }
  // This warpgroup's part of a vector in the resident block's scratch.
  __device__ __forceinline__ float* section(int which) const {
    return p.scratch + blockIdx.x * p.scratch_stride + which * (2 * Fragment<kDim>::kElements) +
           group * Fragment<kDim>::kElements;
  }
  __device__ __forceinline__ float4* row_state() const {
    return reinterpret_cast<float4*>(p.scratch + blockIdx.x * p.scratch_stride +
                                     WorkspaceLayout::kVectors * (2 * Fragment<kDim>::kElements)) +
           group * kWarpgroup + threadIdx.x % kWarpgroup;
  }
  __device__ __forceinline__ uint4* cached_weights(int tile) const {
    return Cache::at(p.weights + blockIdx.x * p.weights_stride, tile, group, threadIdx.x % kWarpgroup);
  }
  // Tells the compiler that all threads of a warp hold the same value.
  __device__ __forceinline__ static int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
  __device__ __forceinline__ const GroupTiles& tiles() const { return s.group_tiles[group]; }
  __device__ __forceinline__ void sync_group() const { named_sync(kGroupBarrier + group, kWarpgroup); }
  __device__ __forceinline__ __half* tile_at(uint32_t position) const { return s.tiles[s.ring.stage(position)]; }

  __device__ __forceinline__ void visible(Pair<KeyRange>& keys, const Lane& lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      keys[r] = visible_keys(p.shape, int64_t{tiles().diagonal} + lane.row + 8 * r, tiles().length_k);
  }
  __device__ __forceinline__ void mask(Scores& scores, int tile) const {
    const int key = (tiles().first + tile) * kKeys;
    if (key >= tiles().unmasked.begin && key + kKeys <= tiles().unmasked.end) return;
    const Lane lane = own_lane();
    Pair<KeyRange> keys;
    visible(keys, lane);
    mask_scores<kKeys>(scores, keys, key, lane);
  }

  __device__ __forceinline__ void largest_pass() {
    Pair<float> largest = {-INFINITY, -INFINITY};
    const PassOrder order{base, uniform(tiles().count), false};
    for (int tile = 0; tile < order.count; ++tile) {
      const uint32_t position = order.key(tile);
      s.ring.wait(position);
      if (tile >= tiles().own.begin && tile < tiles().own.end) {
        Scores scores;
        define(scores);
        mma_fence();
        product_transposed<kDim, kKeys>(scores, s.q[group], tile_at(position));
        mma_commit();
        mma_wait<0>();
        pin(scores);
        s.ring.release(position);
        mask(scores, tile);
#pragma unroll
        for (int e = 0; e < kKeys / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], scores[e]);
      } else {
        s.ring.release(position);
      }
    }
    base = order.end();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = quad_max(largest[r]);
      rows.shift[r] = kWeightExponent - (m == -INFINITY ? 0.0f : ceilf(m * rows.scale[r]));
    }
  }

  __device__ __forceinline__ void issue_logits(Scores& scores, uint32_t position) const {
    product_transposed<kDim, kKeys>(scores, s.q[group], tile_at(position));
    mma_commit();
  }

  __device__ __forceinline__ void means_pass(Vector& mean_k, Vector& mean_v, Pair<float>& omega) {
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) mean_k[e] = mean_v[e] = 0;
    omega[0] = omega[1] = 0;
    const PassOrder order{base, uniform(tiles().count), true};
    const int own_begin = uniform(tiles().own.begin), own_end = uniform(tiles().own.end);
    const auto skip = [&](int tile) {
      s.ring.wait(order.key(tile));
      s.ring.release(order.key(tile));
      s.ring.wait(order.value(tile));
      s.ring.release(order.value(tile));
    };
    int tile = 0;
    for (; tile < order.count && (tile < own_begin || own_end <= own_begin); ++tile) skip(tile);
    if (tile < own_end) {
      Scores scores;
      Words w;
      define(scores);
      const auto exponentiate = [&] {
        pin(scores);
        mask(scores, tile);
        exponentiate_scores<kKeys>(scores, rows);
      };
      s.ring.wait(order.key(tile));
      mma_fence();
      issue_logits(scores, order.key(tile));
      mma_wait<0>();
      exponentiate();
      while (true) {
        pack_weights<kKeys>(w, scores);
        note_live(w, tile);
        if (Config::kCached) Cache::store(cached_weights(tile), w);
        add_row_sums<kKeys>(omega, w);
        pin(w);
        if (tile + 1 >= own_end) break;
        s.ring.wait(order.key(tile + 1));
        s.ring.wait(order.value(tile));
        mma_fence();
        issue_logits(scores, order.key(tile + 1));
        product<kDim, kKeys>(mean_k, w, tile_at(order.key(tile)));
        product<kDim, kKeys>(mean_v, w, tile_at(order.value(tile)));
        mma_commit();
        ++tile;
        mma_wait<1>();
        exponentiate();
        mma_wait<0>();
        pin(scores);
        s.ring.release(order.key(tile - 1));
        s.ring.release(order.value(tile - 1));
      }
      s.ring.wait(order.value(tile));
      mma_fence();
      product<kDim, kKeys>(mean_k, w, tile_at(order.key(tile)));
      product<kDim, kKeys>(mean_v, w, tile_at(order.value(tile)));
      mma_commit();
      mma_wait<0>();
      pin(mean_k);
      pin(mean_v);
      s.ring.release(order.key(tile));
      s.ring.release(order.value(tile));
      ++tile;
    }
    for (; tile < order.count; ++tile) skip(tile);
    base = order.end();
    omega[0] = quad_sum(omega[0]);
    omega[1] = quad_sum(omega[1]);
  }

  // Remembers that a tile has a non-zero weight.
  __device__ __forceinline__ void note_live(const Words& w, int tile) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) any |= w[i];
    if (__any_sync(0xffffffffu, any != 0) && threadIdx.x % 32 == 0 && tile < Config::kLiveWords * 32) {
      atomicOr(&s.live[parity].bits[group][tile / 32], 1u << (tile % 32));
    }
  }

  // Issues what a tile's U is made of: raw scores (unless cached) and raw E = P Kᵀ, or x Kᵀ in two parts.
  template <bool kOutput>
  __device__ __forceinline__ void issue_scores(Scores& scores, Scores& e, uint32_t position) const {
    const __half* keys = tile_at(position);
    if constexpr (!Config::kCached) product_transposed<kDim, kKeys>(scores, s.q[group], keys);
    if constexpr (kOutput) product_transposed<kDim, kKeys>(e, reinterpret_cast<const __half*>(s.residual[group]), keys);
    product_transposed<kDim, kKeys, kOutput>(e, s.p[group], keys);
    mma_commit();
  }

  // E becomes U, not yet rounded, once the tile's products are there.
  __device__ __forceinline__ void finish_scores(Scores& scores, Scores& e, Words& w, const Direction& d,
                                                int tile) const {
    pin(e);
    if constexpr (!Config::kCached) {
      pin(scores);
      mask(scores, tile);
      make_weights<kKeys>(w, scores, rows);
    }
    weight_scores<kKeys>(e, w, d.scale, d.centre);
  }

  // acc = Σ U k over this warpgroup's live tiles (Σ S v in the output pass) and the row sums of the rounded U.
  // Nothing is in flight when it returns: products that cross the end of a loop make the compiler serialise all of
  // them.
  template <bool kOutput>
  __device__ __forceinline__ void weighted_pass(Vector& acc, Pair<float>& sums, const Direction& d, int live) {
    const LiveTiles<Config::kLiveWords>& map = s.live[parity];
    const PassOrder order{base, live, kOutput};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) acc[e] = 0;
    sums[0] = sums[1] = 0;
    const auto mine = [&](int tile) {
      return tile < Config::kLiveWords * 32 ? map.group(group, tile)
                                            : tile >= tiles().own.begin && tile < tiles().own.end;
    };
    const auto last_position = [&](int i) { return kOutput ? order.value(i) : order.key(i); };
    int i = 0, tile = map.next(0, tiles().count);
    while (i < live) {
      if (!mine(tile)) {
        s.ring.wait(order.key(i));
        s.ring.release(order.key(i));
        if (kOutput) {
          s.ring.wait(order.value(i));
          s.ring.release(order.value(i));
        }
        tile = map.next(tile + 1, tiles().count);
        ++i;
        continue;
      }
      // A run of this warpgroup's tiles. The next tile's scores go first, then this tile's U K: while the latter runs,
      // the arithmetic on the scores that are already there hides behind it.
      Scores scores, e;
      Words u, w;
      if constexpr (!Config::kCached) define(scores);
      define(e);
      if constexpr (Config::kCached) Cache::load(w, cached_weights(tile));
      s.ring.wait(order.key(i));
      mma_fence();
      issue_scores<kOutput>(scores, e, order.key(i));
      mma_wait<0>();
      if constexpr (kOutput) s.ring.release(order.key(i));
      finish_scores(scores, e, w, d, tile);
      while (true) {
        round_scores<kKeys>(u, e, sums);
        tile = map.next(tile + 1, tiles().count);
        pin(u);
        if (i + 1 >= live || !mine(tile)) break;
        if constexpr (Config::kCached) Cache::load(w, cached_weights(tile));
        s.ring.wait(order.key(i + 1));
        if constexpr (kOutput) s.ring.wait(order.value(i));
        mma_fence();
        issue_scores<kOutput>(scores, e, order.key(i + 1));
        product<kDim, kKeys>(acc, u, tile_at(last_position(i)));
        mma_commit();
        mma_wait<1>();
        if constexpr (kOutput) s.ring.release(order.key(i + 1));
        finish_scores(scores, e, w, d, tile);
        mma_wait<0>();
        pin(e);
        s.ring.release(last_position(i));
        ++i;
      }
      if constexpr (kOutput) s.ring.wait(order.value(i));
      mma_fence();
      product<kDim, kKeys>(acc, u, tile_at(last_position(i)));
      mma_commit();
      mma_wait<0>();
      pin(acc);
      s.ring.release(last_position(i));
      ++i;
    }
    base = order.end();
  }

  // A pass the other warpgroup still needs.
  __device__ __forceinline__ void idle_pass(int live) {
    const PassOrder order{base, live, false};
    for (int i = 0; i < live; ++i) {
      s.ring.wait(order.key(i));
      s.ring.release(order.key(i));
    }
    base = order.end();
  }

  // Tells the producer and the other warpgroup whether this one needs another pass. Also orders the direction just
  // written before the products that read it.
  __device__ __forceinline__ bool publish(bool active) {
    fence_async_proxy();
    const bool more = named_any(kGroupBarrier + group, kWarpgroup, active);
    if (threadIdx.x % kWarpgroup == 0) {
      s.more[decisions & 1][group] = more;
      s.decided.arrive();
    }
    ++decisions;
    return more;
  }
  __device__ __forceinline__ bool other_needs_pass() {
    const uint32_t last = (decisions - 1) & 1;
    s.decided.wait(last);
    return s.more[last][group ^ 1] != 0;
  }

  // One step of conjugate gradients from acc = Σ U k. Returns whether a row of this thread goes on.
  __device__ __forceinline__ bool take_step(Vector& acc, Pair<float>& sums, Direction& d) {
    const Lane lane = own_lane();
    const float4 state = *row_state();
    uint32_t mean[kDim / 4];
    Fragment<kDim>::load_half(mean, reinterpret_cast<const uint4*>(section(WorkspaceLayout::kMeanHalf)), lane.thread);
    Solve solve;
    SolveMemory::unpack(state, solve, lane);
    Pair<float> scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = quad_sum(sums[r]);
      scale[r] =
          d.scale[r] > 0 ? __fdividef(1.0f, tiles().key_scale * tiles().key_scale * solve.omega[r] * d.scale[r]) : 0.0f;
    }
    const Vectors at{s.p[group], s.residual[group], section(WorkspaceLayout::kX),
                     p.ridge.per_dim ? section(WorkspaceLayout::kRidge) : nullptr};
    step<kDim>(solve, acc, sums, scale, mean, at, lane, tiles().key_norm,
               StepLimits{p.tolerance_squared, p.max_iterations}, d);
    SolveMemory::store(row_state(), solve, lane);
    return solve.active[0] || solve.active[1];
  }

  __device__ __forceinline__ void sees_bad_keys(Pair<bool>& sees, int head_index, int64_t key_row,
                                                const Lane& lane) const {
    sees[0] = sees[1] = false;
    if (p.heads[head_index].bad_keys == 0) return;
    Pair<KeyRange> keys;
    visible(keys, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t bad = 0;
      for (int key = keys[r].begin + lane.column / 2; key < keys[r].end; key += 4) {
        bad |= p.bad_keys[key_row + key] | p.bad_values[key_row + key];
      }
      sees[r] = quad_max(bad ? 1.0f : 0.0f) != 0.0f;
    }
  }

  // Queries into shared memory, and what the passes need to know of the item.
  __device__ __forceinline__ void begin(const ForwardBlock& b) {
    const Lane lane = own_lane();
    const int first_row = b.block.first_row + group * kGroupRows;
    if (lane.thread == 0) {
      GroupTiles& to = s.group_tiles[group];
      to.first = b.tiles.begin;
      to.count = b.tiles.count();
      to.own = tiles_of(visible_keys(p.shape, b.block, first_row, kGroupRows), kKeys);
      to.own.begin -= to.first, to.own.end -= to.first;
      to.unmasked = common_keys(p.shape, b.block, first_row, kGroupRows);
      to.diagonal = first_row + b.block.length_k - b.block.length_q;
      to.length_k = b.block.length_k;
      const HeadScales head(p, b.head_index);
      to.key_scale = head.key;
      to.key_norm = head.key_norm;
    }
    load_queries<kDim>(s.q[group], s.q_scale[group], p, b.block, first_row, lane.thread);
    for (int word = lane.thread; word < Config::kLiveWords; word += kWarpgroup) s.live[parity].bits[group][word] = 0;
    fence_async_proxy();
    sync_group();
    const float key_scale = tiles().key_scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float q_scale = s.q_scale[group][lane.row + 8 * r];
      rows.scale[r] = fmaxf(p.scale_log2 / (finite(q_scale) ? q_scale : 1.0f) / key_scale, 1e-37f);
    }
  }

  // Means, right-hand side, ridge and the first direction. Returns whether a row of this thread is to be solved.
  __device__ __forceinline__ bool prepare(Direction& d) {
    Solve solve;
    Vector mean;
    const Lane lane = own_lane();
    {
      Vector mean_v;
      means_pass(mean, mean_v, solve.omega);
#pragma unroll
      for (int e = 0; e < kDim / 2; ++e) mean_v[e] = divide(mean_v[e], solve.omega[row_of(e)]);
      Fragment<kDim>::store(section(WorkspaceLayout::kMeanV), mean_v, lane.thread);
    }
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) mean[e] = divide(mean[e], solve.omega[row_of(e)]);
    Fragment<kDim>::store(section(WorkspaceLayout::kMeanK), mean, lane.thread);
    Fragment<kDim>::store_half(reinterpret_cast<uint4*>(section(WorkspaceLayout::kMeanHalf)), mean, lane.thread);

    const ForwardBlock b(p, s.item[parity], kKeys);
    const OwnRows own_rows(b.block, group, lane);
    const HeadScales head(p, b.head_index);
    const bool given = p.x.data != nullptr;
    Pair<bool> good, bad;
    sees_bad_keys(bad, b.head_index, b.key_row, lane);
    Pair<float> back;  // fp16 query -> query in units of the keys
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float q_scale = s.q_scale[group][lane.row + 8 * r];
      good[r] = finite(q_scale) && !bad[r];
      back[r] = (p.negative_scale ? -head.key : head.key) / (finite(q_scale) ? q_scale : 1.0f);
      solve.ridge[r] = given || p.ridge.per_dim ? 0.0f : row_ridge(p.ridge, b.block, own_rows.row[r]);
      good[r] = good[r] && solve.ridge[r] >= 0;
    }
    Vector rhs;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      const float2 q = unpack(tile_word<uint32_t>(s.q[group], lane.tile_offset(i / 2, i & 1)));
      rhs[2 * i] = fmaf(q.x, back[i & 1], -mean[2 * i]);
      rhs[2 * i + 1] = fmaf(q.y, back[i & 1], -mean[2 * i + 1]);
    }
    if (!given && p.ridge.per_dim) {
      load_ridge<kDim>(section(WorkspaceLayout::kRidge), rhs, good, p, b.block, own_rows.row, lane);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      solve.active[r] = good[r] && own_rows.exists[r] && solve.omega[r] > 0 && !given && solve.ridge[r] < INFINITY;
    }
    start_solve<kDim>(solve, rhs);
#pragma unroll
    for (int r = 0; r < 2; ++r) solve.status[r] = good[r] ? LLA_ROW_OK : LLA_ROW_NAN;
    Fragment<kDim>::store(s.residual[group], rhs, lane.thread);
    write_direction<kDim>(rhs, mean, s.p[group], nullptr, lane, head.key_norm, solve, d);
    Fragment<kDim>::fill(section(WorkspaceLayout::kX), 0.0f, lane.thread);
    SolveMemory::store(row_state(), solve, lane);
    return solve.active[0] || solve.active[1];
  }

  __device__ __forceinline__ void run_item() {
    Direction d;
    begin(ForwardBlock(p, s.item[parity], kKeys));
    largest_pass();
    bool more = publish(prepare(d));
    bool other = other_needs_pass();  // both have published, so the live tiles are known
    const int live = uniform(s.live[parity].total(tiles().count));
    Vector acc;
    Pair<float> sums;
    while (more || other) {
      if (more) {
        weighted_pass<false>(acc, sums, d, live);
        more = publish(take_step(acc, sums, d));
      } else {  // the other warpgroup still needs its tiles
        idle_pass(live);
        publish(false);
      }
      // The producer fetches a pass's first tiles ahead of the decision: where these are all it has, wait for the other
      // warpgroup here, or this one could decide twice before the other has decided once.
      if (!more || live <= kTilesAhead) other = other_needs_pass();
    }
    write_x(d);
    weighted_pass<true>(acc, sums, d, live);
    write_output(acc, sums, d);
  }

  // x, solved or given, as the direction of the output pass.
  __device__ __forceinline__ void write_x(Direction& d) {
    const ForwardBlock b(p, s.item[parity], kKeys);
    const Lane lane = own_lane();
    const OwnRows own_rows(b.block, group, lane);
    const HeadScales head(p, b.head_index);
    Vector x, mean;
    Solve solve;
    SolveMemory::load(row_state(), solve, lane);
    if (p.x.data != nullptr) {
      Pair<bool> valid;
      load_given_x<kDim>(x, valid, p, b.block, own_rows.row, lane, head.key);
#pragma unroll
      for (int r = 0; r < 2; ++r) solve.status[r] = valid[r] ? solve.status[r] : LLA_ROW_NAN;
      SolveMemory::store(row_state(), solve, lane);
    } else {
      Fragment<kDim>::load(x, section(WorkspaceLayout::kX), lane.thread);
    }
    Fragment<kDim>::load(mean, section(WorkspaceLayout::kMeanK), lane.thread);
    if (p.saved.x != nullptr) {
      Pair<float> scale;
#pragma unroll
      for (int r = 0; r < 2; ++r) scale[r] = solve.status[r] == LLA_ROW_NAN ? NAN : 1.0f / head.key;
      store_saved<kDim>(p.saved.x, x, p.dim, p, b.block, own_rows, scale, lane);
      store_saved<kDim>(p.saved.mean_k, mean, p.dim, p, b.block, own_rows, scale, lane);
    }
    sync_group();  // all threads are done with the residual, whose place takes x's low part
    write_direction<kDim, true>(x, mean, s.p[group], reinterpret_cast<__half*>(s.residual[group]), lane, head.key_norm,
                                solve, d);
    if (lane.column == 0) {  // the queries' scales are no longer needed: x's take their place
      s.q_scale[group][lane.row] = solve.inverse[0];
      s.q_scale[group][lane.row + 8] = solve.inverse[1];
    }
    fence_async_proxy();
    sync_group();
  }

  // o = mean_v + (Σ S v - sums mean_v) / (ω scale), and everything else the caller asked for.
  __device__ __forceinline__ void write_output(Vector& acc, Pair<float>& sums, const Direction& d) {
    const ForwardBlock b(p, s.item[parity], kKeys);
    const Lane lane = own_lane();
    const OwnRows own_rows(b.block, group, lane);
    const HeadScales head(p, b.head_index);
    Vector mean;
    Fragment<kDim>::load(mean, section(WorkspaceLayout::kMeanV), lane.thread);
    Solve solve;
    SolveMemory::load(row_state(), solve, lane);
    Pair<float> back, scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = quad_sum(sums[r]);
      const bool weighted = d.scale[r] > 0 && solve.omega[r] > 0;
      back[r] =
          weighted ? s.q_scale[group][lane.row + 8 * r] / head.key / head.key / (solve.omega[r] * d.scale[r]) : 0.0f;
      scale[r] = solve.status[r] == LLA_ROW_NAN ? NAN : 1.0f / head.value;
    }
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) {
      const int r = row_of(e);
      acc[e] = fmaf(fmaf(-sums[r], mean[e], acc[e]), back[r], mean[e]) * scale[r];
    }
    store_output<kDim>(p.o, acc, p.value_dim, b.block, own_rows, lane);
    if (p.saved.x != nullptr) store_saved<kDim>(p.saved.mean_v, mean, p.value_dim, p, b.block, own_rows, scale, lane);
    if (lane.column != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!own_rows.exists[r]) continue;
      const int64_t index = row_index(p, b.block, own_rows.row[r]);
      const bool bad = solve.status[r] == LLA_ROW_NAN, solved = p.x.data == nullptr;
      if (p.saved.x != nullptr) {
        p.saved.max[index] = bad ? NAN : kWeightExponent - rows.shift[r];
        p.saved.omega[index] = bad ? NAN : solve.omega[r] / kWeightScale;
      }
      if (p.info.iterations != nullptr) p.info.iterations[index] = solved ? solve.iterations[r] : -1;
      if (p.info.residual != nullptr) {
        p.info.residual[index] = !solved                 ? -1.0f
                                 : solve.rr_start[r] > 0 ? sqrtf(solve.rr[r] / solve.rr_start[r])
                                                         : 0.0f;
      }
      if (p.info.status != nullptr) p.info.status[index] = solve.status[r];
    }
  }

  template <class Item>
  __device__ __forceinline__ void take_items(const Item& run_item) {
    for (uint32_t turn = 0;; ++turn) {
      parity = turn & 1;
      s.item_full[parity].wait((turn >> 1) & 1);
      if (s.item[parity] < 0) return;
      run_item();
      sync_group();
      if (threadIdx.x % kWarpgroup == 0) s.item_empty[parity].arrive();
    }
  }
};

}  // namespace lla::cuda::sm90
