// A copying thread: takes work items and streams their key and value tiles, pass after pass. Which passes there are, the
// kernel's own producer knows.
#pragma once

#include "cuda/sm90/block.cuh"
#include "cuda/sm90/bulk.cuh"
#include "cuda/sm90/solve/shared.cuh"
#include "cuda/sm90/weights.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Producer {
  using Cache = WeightCache<Config::kKeys>;
  ForwardShared<Config>& s;
  const ForwardParams& p;
  const CUtensorMap* keys;
  const CUtensorMap* values;
  uint4* weights;   // of this resident block
  const int group;  // the warpgroup it copies for
  Stream<Config>& t = s.stream[group];
  typename decltype(Stream<Config>::ring)::Slot next{};
  typename std::remove_extent_t<decltype(ForwardShared<Config>::weight_ring)>::Slot next_weights{};
  uint32_t decisions = 0;  // taken so far

  __device__ __forceinline__ void load(const CUtensorMap* map, const ForwardBlock& b, int tile) {
    const auto slot = next.take();
    Barrier& barrier = t.ring.acquire(slot, Config::kTileElements * sizeof(__half));
    __half* to = s.tiles[group][slot.stage];
    const int64_t row = b.key_row + int64_t{b.tiles.begin + tile} * Config::kKeys;
#pragma unroll
    for (int column = 0; column < Config::kDim; column += 64) {
      load_box(to + column * Config::kKeys, map, column, static_cast<int>(row), barrier);
    }
  }
  __device__ __forceinline__ void load_weights(int tile) {
    const auto slot = next_weights.take();
    Barrier& barrier = s.weight_ring[group].acquire(slot, Cache::kGroupBytes);
    load_bytes_once(s.weights(group, slot.stage), Cache::at(weights, tile, group), Cache::kGroupBytes, barrier);
  }

  // Progress through a pass over the live tiles: the last two fetched, whose values may still be due.
  struct Progress {
    typename Stream<Config>::ThreadWalk walk;
    int fetched = 0, older = 0, newer = 0;
  };
  // Live tiles up to `to`, with their weights where these are cached, and the values of the tile before last.
  __device__ __forceinline__ void stream(const ForwardBlock& b, Progress& at, int to, bool with_values = false) {
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
    t.decided.wait(parity);
    const bool more = t.more[parity] != 0;
    t.acknowledged.arrive();
    return more;
  }

  // The passes of the solve. Returns how far the pass after them has been fetched: its first tiles are under way before
  // it is known whether the solve goes on.
  __device__ __forceinline__ Progress solve(const ForwardBlock& b, int live, int parity, bool more) {
    Progress at{t.thread_walk(parity, b.tiles.count())};
    while (more) {
      stream(b, at, live);
      at = Progress{t.thread_walk(parity, b.tiles.count())};
      stream(b, at, min(live, kTilesAhead));
      more = another_pass();
    }
    return at;
  }

  // The next item with rows, told to the consumers. Returns whether there is one.
  __device__ __forceinline__ bool next_item(uint32_t turn) {
    const int parity = turn & 1;
    while (true) {
      const int64_t number = atomicAdd(&p.header->next_item, 1u);
      const bool there = number < p.items;
      const ForwardBlock b(p, there ? number : 0, Config::kKeys, Config::kItemRows);
      if (there && b.block.empty()) continue;
      t.item_empty[parity].wait(((turn >> 1) & 1) ^ 1);
      if (there) t.tiles[parity].template describe<Config>(p, b);
      t.there[parity] = there;
      t.item_full[parity].arrive();
      return there;
    }
  }
};

}  // namespace lla::cuda::sm90
