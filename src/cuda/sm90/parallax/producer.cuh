// The copying thread: takes work items and streams their key and value tiles, from the last visible key to the first.
#pragma once

#include "cuda/sm90/forward/block.cuh"
#include "cuda/sm90/parallax/shared.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct ParallaxProducer {
  ParallaxShared<Config>& s;
  const ForwardParams& p;
  const CUtensorMap* keys;
  const CUtensorMap* values;
  uint32_t base = 0;  // position of the item's first tile

  __device__ __forceinline__ void load(const CUtensorMap* map, uint32_t position, int64_t row) {
    Barrier& barrier = s.ring.acquire(position, Config::kTileElements * sizeof(__half));
    __half* to = s.tiles[s.ring.stage(position)];
#pragma unroll
    for (int column = 0; column < Config::kDim; column += 64) {
      load_box(to + column * Config::kKeys, map, column, static_cast<int>(row), barrier);
    }
  }

  __device__ __forceinline__ void run_item(int64_t item) {
    const ForwardBlock b(p, item, Config::kKeys);
    const ParallaxOrder order{base, b.tiles.count()};
    const bool twice = p.saved.x != nullptr;
    const auto row = [&](int i) { return b.key_row + int64_t{b.tiles.end - 1 - i} * Config::kKeys; };
#pragma unroll 1
    for (int i = 0; i < order.count; ++i) {
      load(keys, order.key(i), row(i));
      load(values, order.value(i), row(i));
    }
#pragma unroll 1
    for (int i = 0; twice && i < order.count; ++i) load(keys, order.again(i), row(i));
    base = order.end(twice);
  }

  __device__ __forceinline__ void run() {
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
      run_item(item);
    }
  }
};

}  // namespace lla::cuda::sm90
