// The copying thread: takes work items and streams their key and value tiles, pass after pass.
#pragma once

#include "cuda/sm90/forward/block.cuh"
#include "cuda/sm90/forward/shared.cuh"
#include "cuda/sm90/weights.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Producer {
  ForwardShared<Config>& s;
  const ForwardParams& p;
  const CUtensorMap* keys;
  const CUtensorMap* values;
  uint4* weights;          // of this resident block
  uint32_t base = 0;       // position of the pass
  uint32_t decisions = 0;  // taken so far

  // Progress through a pass: the tile to look at next, and the last two fetched, whose values may still be due.
  struct Walk {
    int next = 0, older = 0, newer = 0;
  };

  __device__ __forceinline__ void load(const CUtensorMap* map, uint32_t position, const ForwardBlock& b, int tile) {
    Barrier& barrier = s.ring.acquire(position, Config::kTileElements * sizeof(__half));
    __half* to = s.tiles[s.ring.stage(position)];
    const int64_t row = b.key_row + int64_t{b.tiles.begin + tile} * Config::kKeys;
#pragma unroll
    for (int column = 0; column < Config::kDim; column += 64) {
      load_box(to + column * Config::kKeys, map, column, static_cast<int>(row), barrier);
    }
  }

  // Tiles [from, to) of a pass, in the order of PassOrder. kLive: only tiles with a non-zero weight.
  template <bool kLive>
  __device__ __forceinline__ void stream(const ForwardBlock& b, const PassOrder& order, int from, int to, Walk& walk, int parity) {
    using Cache = WeightCache<Config::kKeys>;
    for (int i = from; i < to; ++i) {
      if (kLive) walk.next = s.live[parity].next(walk.next, b.tiles.count());
      if (order.values && i >= 2) load(values, order.value(i - 2), b, walk.older);
      load(keys, order.key(i), b, walk.next);
      if (Config::kCached && kLive) {
        prefetch_to_l2(weights + int64_t{walk.next} * Cache::kTileVectors, Cache::kTileVectors * sizeof(uint4));
      }
      walk.older = walk.newer;
      walk.newer = walk.next++;
    }
    if (!order.values || to < order.count) return;
    if (to >= 2) load(values, order.value(to - 2), b, walk.older);
    if (to >= 1) load(values, order.value(to - 1), b, walk.newer);
  }

  __device__ __forceinline__ bool another_pass() {
    const uint32_t parity = decisions++ & 1;
    s.decided.wait(parity);
    return s.more[parity][0] || s.more[parity][1];
  }

  __device__ __forceinline__ void run_item(int64_t item, int parity) {
    const ForwardBlock b(p, item, Config::kKeys);
    const int count = b.tiles.count();
    for (const bool with_values : {false, true}) {  // largest logits, then means
      const PassOrder order{base, count, with_values};
      Walk walk;
      stream<false>(b, order, 0, count, walk, parity);
      base = order.end();
    }
    bool more = another_pass();
    const int live = s.live[parity].total(count);
    const int ahead = min(live, kTilesAhead);
    int fetched = 0;
    Walk walk;
    while (more) {
      const PassOrder order{base, live, false};
      stream<true>(b, order, fetched, live, walk, parity);
      base = order.end();
      walk = Walk{};
      stream<true>(b, PassOrder{base, live, false}, 0, ahead, walk, parity);
      fetched = ahead;
      more = another_pass();
    }
    const PassOrder order{base, live, true};
    stream<true>(b, order, fetched, live, walk, parity);
    base = order.end();
  }

  template <class Item>
  __device__ __forceinline__ void take_items(const Item& run_item) {
    for (uint32_t turn = 0;; ++turn) {
      int64_t item;
      do {
        item = atomicAdd(&p.header->next_item, 1u);
      } while (item < p.items && block_of_item(p.shape, p.cu_q, p.cu_k, item).empty());
      const int parity = turn & 1;
      s.item_empty[parity].wait(((turn >> 1) & 1) ^ 1);
      s.item[parity] = item < p.items ? item : -1;
      s.item_full[parity].arrive();
      if (item >= p.items) return;
      run_item(item, parity);
    }
  }
};

}  // namespace lla::cuda::sm90
