// The copying thread: takes work items and streams their key and value tiles, from the last visible key to the first.
#pragma once

#include "cuda/sm90/block.cuh"
#include "cuda/sm90/parallax/shared.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct ParallaxProducer {
  ParallaxShared<Config>& s;
  const ForwardParams& p;
  const CUtensorMap* keys;
  const CUtensorMap* values;
  uint32_t key_base = 0, value_base = 0;  // positions of the item's first tiles in their rings

  template <class Ring>
  __device__ __forceinline__ void load(const CUtensorMap* map, Ring& ring, __half* tiles, int stride, uint32_t position,
                                       int64_t row) {
    Barrier& barrier = ring.acquire(position, Config::kTileElements * sizeof(__half));
    __half* to = tiles + ring.stage(position) * stride;
#pragma unroll
    for (int column = 0; column < Config::kDim; column += 64) {
      load_box(to + column * Config::kKeys, map, column, static_cast<int>(row), barrier);
    }
  }

  __device__ __forceinline__ void run_item(int64_t item) {
    const ForwardBlock b(p, item, Config::kKeys);
    const int count = b.tiles.count();
    const auto row = [&](int i) { return b.key_row + int64_t{b.tiles.end - 1 - i} * Config::kKeys; };
    const auto load_keys = [&](int i) { load(keys, s.key_ring, s.keys[0], Config::kTileElements, key_base++, row(i)); };
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      load_keys(i);
      load(values, s.value_ring, s.values[0], Config::kTileElements + Config::kOnesElements, value_base++, row(i));
    }
    if (p.saved.x == nullptr) return;
#pragma unroll 1
    for (int i = 0; i < count; ++i) load_keys(i);
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
