// The first pass of the backward's solve: its right-hand side t.
#pragma once

#include "cuda/sm90/solve/solver.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct TargetPass : Solver<Config> {
  using Base = Solver<Config>;
  using Base::warpgroup, Base::next, Base::shared, Base::feed;
  using typename Base::Scores;
  using typename Base::Slot;
  using typename Base::Vector;
  using typename Base::Words;
  static constexpr int kDim = Config::kDim, kKeys = Config::kKeys;

  // t: sums over keys of U k, U = W (gamma - tau) with the scale and centre of `d`; G lies where residuals will. Finds
  // the largest weights on the way. Tiles come as V0 K0 V1 K1 ...: with values first, a ring of three has room for the
  // next tile's values and keys beside this tile's keys.
  __device__ __forceinline__ void target_pass(Vector& target, Pair<float>& sums, Pair<float>& largest,
                                              const Direction& d, bool two_parts) {
    __half2 most[2] = {};
#pragma unroll
    for (int e = 0; e < kDim / 2; ++e) target[e] = 0;
    sums[0] = sums[1] = 0;
    const int count = uniform(this->tiles().count);
    // At D = 64 the second part costs nothing: the pass waits for tiles, not for products.
    if constexpr (kDim == 64) {
      two_part_target(target, sums, most, d, count);
    } else if (two_parts) {
      two_part_target(target, sums, most, d, count);
    } else if (count > 0) {
      one_part_target(target, sums, most, d, count);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = quad_sum(sums[r]);
      largest[r] = quad_max(fmaxf(__low2float(most[r]), __high2float(most[r])));
    }
  }

  __device__ __forceinline__ void keep_largest(__half2 (&most)[2], const Words& w) const {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) most[i & 1] = __hmax2(most[i & 1], *reinterpret_cast<const __half2*>(&w[i]));
  }
  // γ = G Vᵀ, raw.
  __device__ __forceinline__ void issue_gamma(Scores& gamma, const Slot& value) const {
    product_transposed<kDim, kKeys>(gamma, shared.spare_operand(warpgroup), this->tile_at(value));
    mma_commit();
  }

  // As in the passes of the solve: the next tile's scores and G Vᵀ are issued first, this tile's U K once the next
  // weights are made.
  __device__ __forceinline__ void one_part_target(Vector& target, Pair<float>& sums, __half2 (&most)[2],
                                                  const Direction& d, int count) {
    const TileRange clear = uniform(this->tiles().clear);
    Words w, u;
    Scores scores, gamma;
    define(scores);
    define(gamma);
    int tile = 0;
    Slot value = next.take(), key = next.take();
    feed.ring.wait(value);
    feed.ring.wait(key);
    mma_fence();
    this->issue_logits(scores, key);
    issue_gamma(gamma, value);
    mma_wait<1>();
    this->exponentiate(scores, tile, clear);
    pack_scores<kKeys>(w, scores);
    take_gamma<0>(gamma, w, d, value);
    pack_scores<kKeys>(u, gamma);
    while (true) {
      pin(u);
      this->keep_weights(w, tile);
      keep_largest(most, w);
      if (++tile == count) break;
      value = next.take();
      const Slot after = next.take();
      feed.ring.wait(value);
      feed.ring.wait(after);
      mma_fence();
      this->issue_logits(scores, after);
      issue_gamma(gamma, value);
      add_row_sums<kKeys>(sums, u);
      pin(sums);
      mma_wait<1>();
      this->exponentiate(scores, tile, clear);
      pack_scores<kKeys>(w, scores);
      pin(w);
      this->finish_before(key);
      // t += U K, U = W (γ - τ)
      mma_fence();
      product<kDim, kKeys>(target, u, this->tile_at(key));
      mma_commit();
      take_gamma<1>(gamma, w, d, value);
      mma_wait<0>();
      pin(gamma);
      feed.ring.release(key);
      pack_scores<kKeys>(u, gamma);  // not before: the product that has just ended was reading u
      key = after;
    }
    mma_fence();
    product<kDim, kKeys>(target, u, this->tile_at(key));
    mma_commit();
    add_row_sums<kKeys>(sums, u);
    pin(sums);
    mma_wait<0>();
    pin(target);
    feed.ring.release(key);
  }
  // Gamma becomes U, not yet rounded, once it is there. kBehind: batches of products committed after it.
  template <int kBehind>
  __device__ __forceinline__ void take_gamma(Scores& gamma, const Words& w, const Direction& d, const Slot& value) {
    mma_wait<kBehind>();
    pin(gamma);
    weight_scores<kKeys>(gamma, w, d.scale, d.centre);
    pin(gamma);
    this->finish_before(value);
    feed.ring.release(value);
  }

  // The same with U in two parts, one tile after the other: for rows with few keys, or a long x.
  __device__ __forceinline__ void two_part_target(Vector& target, Pair<float>& sums, __half2 (&most)[2],
                                                  const Direction& d, int count) {
    const TileRange clear = uniform(this->tiles().clear);
    for (int tile = 0; tile < count; ++tile) {
      const Slot value = next.take(), key = next.take();
      Words w;
      Scores scores, gamma;
      define(scores);
      define(gamma);
      feed.ring.wait(key);
      feed.ring.wait(value);
      mma_fence();
      this->issue_logits(scores, key);
      issue_gamma(gamma, value);
      mma_wait<0>();
      pin(gamma);
      feed.ring.release(value);
      this->exponentiate(scores, tile, clear);
      pack_scores<kKeys>(w, scores);
      this->keep_weights(w, tile);
      keep_largest(most, w);
      weight_scores<kKeys>(gamma, w, d.scale, d.centre);
      this->add_parts(target, sums, gamma, this->tile_at(key));
      feed.ring.release(key);
    }
  }
};

}  // namespace lla::cuda::sm90
