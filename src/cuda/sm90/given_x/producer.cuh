// The producer thread: takes work items and streams their key and value tiles, from the last visible key to the first.
#pragma once

#include "cuda/sm90/given_x/shared.cuh"
#include "cuda/tensor/block.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct GivenXProducer {
  GivenXShared<Config>& shared;
  const ForwardParams& params;
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
    const ForwardItem b(params, item, Config::kKeys);
    const int count = b.tiles.count();
    const auto row = [&](int i) { return b.key_row + int64_t{b.tiles.end - 1 - i} * Config::kKeys; };
    const auto load_keys = [&](int i) {
      load(keys, shared.key_ring, shared.keys[0], Config::kTileElements, key_base++, row(i));
    };
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      load_keys(i);
      load(values, shared.value_ring, shared.values[0], Config::kTileElements + Config::kOnesElements, value_base++,
           row(i));
    }
    if (params.saved.x == nullptr) return;
#pragma unroll 1
    for (int i = 0; i < count; ++i) load_keys(i);
  }

  __device__ __forceinline__ void run() {
    for (uint32_t turn = 0;; ++turn) {
      int64_t item;
      do {
        item = atomicAdd(&params.header->next_item, 1u);
      } while (item < params.items && block_of_item(params.shape, params.cu_q, params.cu_k, item).empty());
      const int parity = turn & 1;
      shared.item_empty[parity].wait(((turn >> 1) & 1) ^ 1);
      shared.item[parity] = item < params.items ? item : -1;
      shared.item_full[parity].arrive();
      if (item >= params.items) return;
      run_item(item);
    }
  }
};

}  // namespace lla::cuda::sm90
