// A copying thread: takes work items and streams their key and value tiles, pass after pass.
#pragma once

#include "cuda/sm90/bulk.cuh"
#include "cuda/sm90/forward/block.cuh"
#include "cuda/sm90/forward/shared.cuh"
#include "cuda/sm90/weights.cuh"

namespace lla::cuda::sm90 {

template <class Config>
struct Producer {
  using Cache = WeightCache<Config::kKeys>;
  static constexpr int kMembers = Config::kMembers;
  ForwardShared<Config>& s;
  const ForwardParams& p;
  const CUtensorMap* keys;
  const CUtensorMap* values;
  uint4* weights;  // of this resident block
  const int stream_index;
  Stream<Config>& t = s.stream[stream_index];
  typename decltype(Stream<Config>::ring)::Slot next{};
  typename std::remove_extent_t<decltype(ForwardShared<Config>::weight_ring)>::Slot next_weights[kMembers] = {};
  uint32_t decisions = 0;             // taken so far
  bool weights_ahead[kMembers] = {};  // the first weights of the member's next pass are there already

  __device__ __forceinline__ ForwardBlock block(int64_t item) const {
    return {p, item, Config::kKeys, Config::kItemRows};
  }

  __device__ __forceinline__ void load(const CUtensorMap* map, const ForwardBlock& b, int tile) {
    const auto slot = next.take();
    Barrier& barrier = t.ring.acquire(slot, Config::kTileElements * sizeof(__half));
    __half* to = s.tiles[stream_index][slot.stage];
    const int64_t row = b.key_row + int64_t{b.tiles.begin + tile} * Config::kKeys;
#pragma unroll
    for (int column = 0; column < Config::kDim; column += 64) {
      load_box(to + column * Config::kKeys, map, column, static_cast<int>(row), barrier);
    }
  }
  __device__ __forceinline__ void load_weights(int member, int tile) {
    const int group = stream_index * kMembers + member;
    const auto slot = next_weights[member].take();
    Barrier& barrier = s.weight_ring[group].acquire(slot, Cache::kGroupBytes);
    load_bytes_once(s.weights(group, slot.stage), Cache::at(weights, tile, group), Cache::kGroupBytes, barrier);
  }

  // A pass over every tile, before weights are known.
  __device__ __forceinline__ void stream_all(const ForwardBlock& b, bool with_values) {
#pragma unroll 1
    for (int i = 0; i < b.tiles.count(); ++i) {
      load(keys, b, i);
      if (with_values) load(values, b, i);
    }
  }

  // Progress through a pass over the live tiles: the last two fetched, whose values may still be due.
  struct Progress {
    typename Stream<Config>::ThreadWalk walk;
    int fetched = 0, older = 0, newer = 0;
  };
  // Live tiles up to `to`, with the weights of the members that take part, and the values of the tile before last.
  __device__ __forceinline__ void stream(const ForwardBlock& b, Progress& at, int to,
                                         const bool (&takes_part)[kMembers], bool with_values = false) {
#pragma unroll 1
    for (; at.fetched < to; ++at.fetched) {
      at.walk.advance();
      if (with_values && at.fetched >= 2) load(values, b, at.older);
      load(keys, b, at.walk.tile);
      at.older = at.newer;
      at.newer = at.walk.tile;
      if constexpr (Config::kCached) {
#pragma unroll
        for (int g = 0; g < kMembers; ++g) {
          if (takes_part[g] && at.walk.takes(g)) load_weights(g, at.walk.tile);
        }
      }
    }
  }

  __device__ __forceinline__ bool another_pass(bool (&wanted)[kMembers]) {
    const uint32_t parity = decisions++ & 1;
    t.decided.wait(parity);
    bool any = false;
#pragma unroll
    for (int g = 0; g < kMembers; ++g) {
      wanted[g] = t.more[parity][g];
      any |= wanted[g];
    }
    t.acknowledged.arrive();
    return any;
  }

  // The passes of the solve. Returns how far the pass after them has been fetched: its first tiles are under way before
  // it is known whether the solve goes on. A warpgroup that has stopped keeps its first weights until its next pass.
  __device__ __forceinline__ Progress solve(const ForwardBlock& b, int live, int parity, bool more,
                                            bool (&wanted)[kMembers]) {
    Progress at{t.thread_walk(parity)};
    while (more) {
      stream(b, at, live, wanted);
      at = Progress{t.thread_walk(parity)};
      bool lacks[kMembers];
#pragma unroll
      for (int g = 0; g < kMembers; ++g) lacks[g] = wanted[g] || !weights_ahead[g];
      stream(b, at, min(live, kTilesAhead), lacks);
#pragma unroll
      for (int g = 0; g < kMembers; ++g) weights_ahead[g] = true;
      more = another_pass(wanted);
    }
#pragma unroll
    for (int g = 0; g < kMembers; ++g) weights_ahead[g] = false;
    return at;
  }

  __device__ __forceinline__ void run_item(int64_t item, int parity) {
    const ForwardBlock b = block(item);
    stream_all(b, false);  // largest logits
    stream_all(b, true);   // means
    bool wanted[kMembers];
    const bool more = another_pass(wanted);
    const int live = t.live[parity].total(b.tiles.count());
    Progress at = solve(b, live, parity, more, wanted);
#pragma unroll
    for (int g = 0; g < kMembers; ++g) wanted[g] = true;
    stream(b, at, live, wanted, true);
    if (live >= 2) load(values, b, at.older);
    if (live >= 1) load(values, b, at.newer);
  }

  // The next item with rows, told to the consumers; -1 when there is none.
  __device__ __forceinline__ int64_t next_item(uint32_t turn) {
    int64_t item;
    do {
      item = atomicAdd(&p.header->next_item, 1u);
    } while (item < p.items && block_of_item(p.shape, p.cu_q, p.cu_k, item, Config::kItemRows).empty());
    if (item >= p.items) item = -1;
    const int parity = turn & 1;
    t.item_empty[parity].wait(((turn >> 1) & 1) ^ 1);
    t.item[parity] = item;
    t.item_full[parity].arrive();
    return item;
  }
};

}  // namespace lla::cuda::sm90
