// A producer thread: takes work items and streams their key and value tiles, pass after pass. Which passes there are,
// the kernel's own producer knows.
#pragma once

#include "cuda/sm90/solve/shared.cuh"
#include "cuda/tensor/block.cuh"
#include "cuda/tensor/weights.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Producer {
  using Cache = WeightCache<Config::kKeys>;
  ForwardShared<Config>& shared;
  const ForwardParams& params;
  const CUtensorMap* keys;
  const CUtensorMap* values;
  uint4* weights;                                   // of this resident block
  const int warpgroup;                              // the warpgroup it copies for
  Feed<Config>& feed = *(shared.feed + warpgroup);  // no index: threads of the other role have one, too, and never look
  typename decltype(Feed<Config>::ring)::Slot next{};
  typename std::remove_extent_t<decltype(ForwardShared<Config>::weight_ring)>::Slot next_weights{};
  uint32_t decisions = 0;  // taken so far

  __device__ __forceinline__ void load(const CUtensorMap* map, const ForwardItem& b, int tile) {
    const auto slot = next.take();
    Barrier& barrier = feed.ring.acquire(slot, Config::kTileElements * sizeof(__half));
    __half* to = shared.tiles[warpgroup][slot.stage];
    const int64_t row = b.key_row + int64_t{b.tiles.begin + tile} * Config::kKeys;
#pragma unroll
    for (int column = 0; column < Config::kDim; column += 64) {
      load_box(to + column * Config::kKeys, map, column, static_cast<int>(row), barrier);
    }
  }
  __device__ __forceinline__ void load_weights(int tile) {
    const auto slot = next_weights.take();
    Barrier& barrier = shared.weight_ring[warpgroup].acquire(slot, Cache::kWarpgroupBytes);
    load_bytes_once(shared.weights(warpgroup, slot.stage), Cache::at(weights, tile, warpgroup), Cache::kWarpgroupBytes,
                    barrier);
  }

  // Progress through a pass over the live tiles: the last two fetched, whose values may still be due.
  struct Progress {
    typename Feed<Config>::ThreadWalk walk;
    int fetched = 0, older = 0, newer = 0;
  };
  // Live tiles up to `to`, with their weights where these are cached, and the values of the tile before last.
  __device__ __forceinline__ void bring(const ForwardItem& b, Progress& at, int to, bool with_values = false) {
#pragma unroll 1
    for (; at.fetched < to; ++at.fetched) {
      at.walk.advance();
      if constexpr (Config::kCached && Config::kWeightsFirst) load_weights(at.walk.tile);
      if (with_values && at.fetched >= 2) load(values, b, at.older);
      load(keys, b, at.walk.tile);
      at.older = at.newer;
      at.newer = at.walk.tile;
      if constexpr (Config::kCached && !Config::kWeightsFirst) load_weights(at.walk.tile);
    }
  }

  __device__ __forceinline__ bool another_pass() {
    const uint32_t parity = decisions++ & 1;
    feed.decided.wait(parity);
    const bool more = feed.more[parity] != 0;
    feed.acknowledged.arrive();
    return more;
  }

  // The passes of the solve. Returns how far the pass after them has been fetched: its first tiles are under way before
  // it is known whether the solve goes on.
  __device__ __forceinline__ Progress solve(const ForwardItem& b, int live, int parity, bool more) {
    Progress at{feed.thread_walk(parity, b.tiles.count())};
    while (more) {
      bring(b, at, live);
      at = Progress{feed.thread_walk(parity, b.tiles.count())};
      bring(b, at, min(live, kTilesAhead));
      more = another_pass();
    }
    return at;
  }

  // The next item with rows, told to the consumers. Returns whether there is one.
  __device__ __forceinline__ bool next_item(uint32_t turn) {
    const int parity = turn & 1;
    while (true) {
      const int64_t number = atomicAdd(&params.header->next_item, 1u);
      const bool there = number < params.items;
      const ForwardItem b(params, there ? number : 0, Config::kKeys, Config::kItemRows);
      if (there && b.block.empty()) continue;
      feed.item_empty[parity].wait(((turn >> 1) & 1) ^ 1);
      if (there) feed.tiles[parity].template describe<Config>(params, b);
      feed.there[parity] = there;
      feed.item_full[parity].arrive();
      return there;
    }
  }
};

}  // namespace lla::cuda::sm90
