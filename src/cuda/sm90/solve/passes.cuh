// A consumer warpgroup's passes over the keys: products, weights and sums, nothing of the solve.
//
// In every pass the next tile's scores are issued first, then this tile's product with keys or values: the arithmetic
// on the scores hides behind the latter, and behind the other warpgroup's products. Nothing is in flight when a pass
// returns: products that cross the end of a loop make the compiler serialise all of them.
#pragma once

#include <type_traits>

#include "cuda/sm90/mma.cuh"
#include "cuda/sm90/solve/shared.cuh"
#include "cuda/tensor/block.cuh"
#include "cuda/tensor/cg.cuh"
#include "cuda/tensor/weights.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Passes {
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys;
  using Cache = WeightCache<kKeys>;
  using Vector = float[kDim / 2];
  using Sums = float[kDim / 2 + (Config::kOnes ? 4 : 0)];  // with row sums: of rows r, r, r + 8, r + 8
  using Scores = float[kKeys / 2];
  using Words = uint32_t[kKeys / 4];
  using DirectionWords = uint32_t[kDim / 4];

  // Of the direction, in the output pass: with none U is W, and the pass makes the mean value.
  enum class Parts { none, high, both };

  using Slot = typename decltype(Feed<Config>::ring)::Slot;
  using WeightSlot = typename std::remove_extent_t<decltype(ForwardShared<Config>::weight_ring)>::Slot;

  ForwardShared<Config>& shared;
  const ForwardParams& params;
  const int warpgroup;                              // of the block
  Feed<Config>& feed = *(shared.feed + warpgroup);  // no index, as the producer's
  Slot next;                                        // of the ring
  WeightSlot next_weights;
  int parity = 0;  // of the item
  RowLogits rows;

  __device__ __forceinline__ static Lane own_lane() { return Lane(threadIdx.x % kWarpgroupThreads); }
  __device__ __forceinline__ const WarpgroupTiles& tiles() const { return feed.tiles[parity]; }
  __device__ __forceinline__ __half* tile_at(const Slot& slot) const { return shared.tiles[warpgroup][slot.stage]; }

  __device__ __forceinline__ void visible(Pair<KeyRange>& keys, const Lane& lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      keys[r] = visible_keys(params.shape, int64_t{tiles().diagonal} + lane.row + 8 * r, tiles().length_k);
  }
  __device__ __forceinline__ void mask(Scores& scores, int tile, TileRange clear) const {
    if (tile >= clear.begin && tile < clear.end) return;
    const Lane lane = own_lane();
    Pair<KeyRange> keys;
    visible(keys, lane);
    mask_scores<kKeys>(scores, keys, (tiles().first + tile) * kKeys, lane);
  }

  // S = Q Kᵀ, raw.
  __device__ __forceinline__ void issue_logits(Scores& scores, const Slot& key) const {
    product_transposed<kDim, kKeys>(scores, shared.queries(warpgroup), tile_at(key));
    mma_commit();
  }
  // The assembler moves arithmetic past a wait for products, which then hides nothing, but not past a branch: this is
  // one. The tile is there and held, so nobody waits.
  __device__ __forceinline__ void finish_before(const Slot& held) const { feed.ring.wait(held); }

  // acc += U B, with the row sums of U behind it where ones make them; where not, they are added up in `sums`.
  __device__ __forceinline__ void add_product(Sums& acc, const Words& u, const __half* b) const {
    if constexpr (Config::kOnes) {
      product_with_sums<kKeys>(acc, u, b, &shared.ones);
    } else {
      product<kDim, kKeys>(acc, u, b);
    }
  }
  __device__ __forceinline__ static void add_sums(Pair<float>& sums, const Words& u) {
    if constexpr (!Config::kOnes) {
      add_row_sums<kKeys>(sums, u);
      pin(sums);
    }
  }
  // Over the threads of a quad.
  __device__ __forceinline__ static void finish_sums(Pair<float>& total, const Pair<float>& sums) {
    if constexpr (!Config::kOnes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) total[r] = quad_sum(sums[r]);
    }
  }
  __device__ __forceinline__ static void separate(Vector& acc, Pair<float>& sums, const Sums& both) {
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) acc[e] = both[e];
    if constexpr (Config::kOnes) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sums[r] = both[kDim / 2 + 2 * r];
    }
  }

  // Σ W k, ω and the largest raw scores; which tiles have a weight at all; the cached weights.
  __device__ __forceinline__ void means_pass(Vector& mean, Pair<float>& omega, Pair<float>& largest) {
    Sums keys;
    define(keys);
    omega[0] = omega[1] = 0;
    largest[0] = largest[1] = -INFINITY;
    Pair<float> sums = {0, 0};
    const int count = uniform(tiles().count);
    const TileRange clear = uniform(tiles().clear);
    int tile = 0;
    if (tile < count) {
      Scores scores;
      Words w;
      define(scores);
      Slot key = next.take();
      feed.ring.wait(key);
      mma_fence();
      issue_logits(scores, key);
      mma_wait<0>();
      exponentiate(scores, tile, clear, &largest);
      pack_scores<kKeys>(w, scores);
      while (true) {
        keep_weights(w, tile);
        add_sums(sums, w);
        pin(w);
        if (tile + 1 >= count) {
          mma_fence();
          add_product(keys, w, tile_at(key));
          mma_commit();
          mma_wait<0>();
          pin(keys);
          feed.ring.release(key);
          break;
        }
        const Slot next_key = next.take();
        feed.ring.wait(next_key);
        // S of the next tile;  Σ W k += W K of this one
        mma_fence();
        issue_logits(scores, next_key);
        add_product(keys, w, tile_at(key));
        mma_commit();
        ++tile;
        mma_wait<1>();
        exponentiate(scores, tile, clear, &largest);
        finish_before(key);
        mma_wait<0>();
        pin(scores);
        feed.ring.release(key);
        pack_scores<kKeys>(w, scores);
        key = next_key;
      }
    }
    finish_sums(omega, sums);
    separate(mean, omega, keys);
    largest[0] = quad_max(largest[0]);
    largest[1] = quad_max(largest[1]);
  }
  // Weights in place of raw scores; of these, the largest so far where asked for.
  __device__ __forceinline__ void exponentiate(Scores& scores, int tile, TileRange clear,
                                               Pair<float>* largest = nullptr) const {
    pin(scores);
    mask(scores, tile, clear);
    if (largest != nullptr) {
#pragma unroll
      for (int e = 0; e < kKeys / 2; ++e) (*largest)[row_of(e)] = fmaxf((*largest)[row_of(e)], scores[e]);
    }
    exponentiate_scores<kKeys>(scores, rows);
    pin(scores);
  }

  // Remembers that a tile has a non-zero weight and, where weights are cached, the weights.
  __device__ __forceinline__ void keep_weights(const Words& w, int tile) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) any |= w[i];
    if (__any_sync(0xffffffffu, any != 0) && threadIdx.x % 32 == 0 && tile < Config::kLiveWords * 32) {
      atomicOr(&feed.live[parity].bits[tile / 32], 1u << (tile % 32));
    }
    if constexpr (Config::kCached) {
      uint4* const block = params.weights + blockIdx.x * params.weights_stride;
      Cache::store(Cache::at(block, tile, warpgroup), w, threadIdx.x % kWarpgroupThreads);
    }
  }

  // Issues what a tile's U is made of: raw scores (unless cached) and raw E = d Kᵀ, of x with its low part.
  template <bool kOutput>
  __device__ __forceinline__ void issue_scores(Scores& scores, Scores& e, const DirectionWords& direction, Parts parts,
                                               const Slot& key) const {
    // S = Q Kᵀ;  E = d Kᵀ, in the output x Kᵀ (+ x_low Kᵀ)
    if constexpr (!Config::kCached) issue_logits(scores, key);
    if (!kOutput || parts != Parts::none) product_transposed<kDim, kKeys>(e, direction, tile_at(key));
    if (kOutput && parts == Parts::both) {
      mma_fence();
      product_transposed<kDim, kKeys, true>(e, shared.spare_operand(warpgroup), tile_at(key));
    }
    if (kOutput) mma_fence();
    mma_commit();
  }

  // The weights of a tile: read back, or made from its scores once they are there. kBehind: batches of products
  // committed after them, E for one.
  template <int kBehind>
  __device__ __forceinline__ void take_weights(Words& w, Scores& scores, int tile, TileRange clear) {
    if constexpr (Config::kCached) {
      const WeightSlot slot = next_weights.take();
      shared.weight_ring[warpgroup].wait(slot);
      Cache::load(w, shared.weights(warpgroup, slot.stage), threadIdx.x % kWarpgroupThreads);
      pin(w);
      __syncwarp();  // one lane speaks for all that have read
      shared.weight_ring[warpgroup].release(slot, Cache::all(w));
    } else {
      mma_wait<kBehind>();
      pin(scores);
      mask(scores, tile, clear);
      make_weights<kKeys>(w, scores, rows);
      pin(w);
    }
  }

  // E, scaled and centred, in fp16, once it is there. kBehind: batches of products committed after it.
  template <int kBehind>
  __device__ __forceinline__ void take_centred(Words& centred, Scores& e, const Direction& d, const Slot& held) const {
    mma_wait<kBehind>();
    pin(e);
    centre_scores<kKeys>(centred, e, d.scale, d.centre);
    pin(centred);
    finish_before(held);
  }

  // acc += U B and the row sums of U, in two parts, each rounded to fp16. U is used up.
  __device__ __forceinline__ void add_parts(Vector& acc, Pair<float>& sums, Scores& u, const __half* b) const {
    for (int part = 0; part < 2; ++part) {
      Words words;
      pack_scores<kKeys>(words, u);
      add_row_sums<kKeys>(sums, words);
      subtract_words<kKeys>(u, words);
      pin(words);
      mma_fence();
      product<kDim, kKeys>(acc, words, b);
      mma_commit();
      mma_wait<0>();
      pin(acc);
    }
  }

  // The passes of the solve and the output pass go through the live tiles in the order K0 K1 K2 ... or K0 K1 V0 K2 V1
  // ...: beside tile i, the slot of the next key tile comes before that of tile i's values.
  __device__ __forceinline__ Slot take_after(const Slot& key, bool there_is_one) {
    return there_is_one ? next.take() : key;
  }
  template <bool kOutput>
  __device__ __forceinline__ Slot take_factor(const Slot& key) {  // what U is multiplied with
    return kOutput ? next.take() : key;
  }

  struct Nothing {
    __device__ __forceinline__ void operator()() const {}
  };
  // acc = Σ U k over the live tiles (Σ U v in the output pass, where the direction may have a low part) and the row
  // sums of the rounded U. `two_parts`: U in two parts. `ahead` is called a tile before the end (in two parts before the
  // first), `meanwhile` at the end of every run of tiles, and so of the last, with the run's last product under way.
  template <bool kOutput, class Ahead = Nothing, class Meanwhile = Nothing>
  __device__ __forceinline__ void weighted_pass(Vector& acc, Pair<float>& sums, const DirectionWords& direction,
                                                Parts parts, const Direction& d, int live, bool two_parts,
                                                const Ahead& ahead = {}, const Meanwhile& meanwhile = {}) {
    sums[0] = sums[1] = 0;
    if (two_parts) {
      define(acc);
      ahead();
      two_part_tiles<kOutput>(acc, sums, direction, parts, d, live);
      meanwhile();
      sums[0] = quad_sum(sums[0]);
      sums[1] = quad_sum(sums[1]);
    } else {
      Sums both;
      define(both);
      one_part_tiles<kOutput>(both, sums, direction, parts, d, live, ahead, meanwhile);
      separate(acc, sums, both);
    }
  }

  template <bool kOutput, class Ahead, class Meanwhile>
  __device__ __forceinline__ void one_part_tiles(Sums& acc, Pair<float>& sums, const DirectionWords& direction,
                                                 Parts parts, const Direction& d, int live, const Ahead& ahead,
                                                 const Meanwhile& meanwhile) {
    // Reads of shared memory queue behind a warp's own products. Weights that are read back come before this tile's: in
    // the output pass, where values are the last to come, and at D = 64, where little else is left to do meanwhile (at
    // D = 128 the row sums are, and it would cost 2 %).
    constexpr bool kWeightsFirst = Config::kCached && (kOutput || kDim == 64);
    const TileRange clear = uniform(tiles().clear);
    auto walk = feed.warp_walk(parity);
    Slot key = take_after(next, live > 0);
    int i = 0;
    Pair<float> own = {0, 0};  // this thread's part of the sums
    while (i < live) {
      // A run of live tiles.
      walk.advance();
      int tile = walk.tile;
      const int end = i + walk.run();
      Scores scores, e;
      Words u, w, centred;
      if constexpr (!Config::kCached) define(scores);
      define(e);
      if (kOutput) pin(e);  // zeros, for Parts::none
      feed.ring.wait(key);
      mma_fence();
      issue_scores<kOutput>(scores, e, direction, parts, key);
      if (i + 1 == live) ahead();
      take_weights<1>(w, scores, tile, clear);
      take_centred<0>(centred, e, d, key);
      if constexpr (kOutput) feed.ring.release(key);
      multiply_words(u, w, centred);
      for (; i + 1 < end; ++i) {
        const Slot after = take_after(key, true), factor = take_factor<kOutput>(key);
        if (!kOutput || parts != Parts::none) define(e);  // anew: kept, E would be copied to where it is multiplied
        pin(u);
        feed.ring.wait(after);
        if constexpr (kOutput && !kWeightsFirst) feed.ring.wait(factor);
        // S and E of the next tile;  Σ U k += U K of this one (output: Σ U v += U V)
        mma_fence();
        issue_scores<kOutput>(scores, e, direction, parts, after);
        if constexpr (kWeightsFirst) {
          take_weights<1>(w, scores, tile + 1, clear);
          if constexpr (kOutput) feed.ring.wait(factor);
          mma_fence();
        }
        add_product(acc, u, tile_at(factor));
        mma_commit();
        add_sums(own, u);
        if constexpr (!kWeightsFirst) take_weights<2>(w, scores, tile + 1, clear);
        ++tile;
        if (i + 2 == live) ahead();
        finish_before(factor);
        take_centred<1>(centred, e, d, factor);
        if constexpr (kOutput) feed.ring.release(after);
        mma_wait<0>();
        pin(centred);
        feed.ring.release(factor);
        multiply_words(u, w, centred);  // not before: the product that has just ended was reading u
        key = after;
      }
      const Slot after = take_after(key, i + 1 < live), factor = take_factor<kOutput>(key);
      pin(u);
      if constexpr (kOutput) feed.ring.wait(factor);
      mma_fence();
      add_product(acc, u, tile_at(factor));
      mma_commit();
      meanwhile();
      add_sums(own, u);
      finish_sums(sums, own);  // the shuffles keep it before the wait
      mma_wait<0>();
      pin(acc);
      feed.ring.release(factor);
      key = after;
      ++i;
    }
  }

  // The same with U in two parts, one tile after the other: for rows with few keys.
  template <bool kOutput>
  __device__ __forceinline__ void two_part_tiles(Vector& acc, Pair<float>& sums, const DirectionWords& direction,
                                                 Parts parts, const Direction& d, int live) {
    const TileRange clear = uniform(tiles().clear);
    auto walk = feed.warp_walk(parity);
    Slot key = take_after(next, live > 0);
    for (int i = 0; i < live; ++i) {
      walk.advance();
      Scores scores, e;
      Words w;
      if constexpr (!Config::kCached) define(scores);
      define(e);
      if (kOutput) pin(e);  // zeros, for Parts::none
      feed.ring.wait(key);
      mma_fence();
      issue_scores<kOutput>(scores, e, direction, parts, key);
      take_weights<1>(w, scores, walk.tile, clear);
      mma_wait<0>();
      pin(e);
      weight_scores<kKeys>(e, w, d.scale, d.centre);
      pin(e);
      finish_before(key);
      if (kOutput) feed.ring.release(key);
      const Slot after = take_after(key, i + 1 < live), factor = take_factor<kOutput>(key);
      if (kOutput) feed.ring.wait(factor);
      add_parts(acc, sums, e, tile_at(factor));
      feed.ring.release(factor);
      key = after;
    }
  }
};

}  // namespace lla::cuda::sm90
