// Which tiles of an item the passes after the first visit, and the walk through them. Device functions for nvcc, plain
// ones for other compilers: the tests run them on the CPU.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/sm90/schedule.hpp"

#ifdef __CUDACC__
#define LLA_WALK __device__ __forceinline__
#else
#define LLA_WALK constexpr
#endif

namespace lla::cuda::sm90 {

namespace detail {
#ifdef __CUDACC__
LLA_WALK int lowest_bit(uint32_t x) { return __ffs(x) - 1; }
LLA_WALK int bit_count(uint32_t x) { return __popc(x); }
LLA_WALK int smaller(int a, int b) { return min(a, b); }
LLA_WALK int larger(int a, int b) { return max(a, b); }
#else
LLA_WALK int lowest_bit(uint32_t x) { return std::countr_zero(x); }
LLA_WALK int bit_count(uint32_t x) { return std::popcount(x); }
LLA_WALK int smaller(int a, int b) { return a < b ? a : b; }
LLA_WALK int larger(int a, int b) { return a > b ? a : b; }
#endif
}  // namespace detail

// Which tiles of an item have a non-zero weight, a bit per tile and warpgroup. A tile without one adds exactly nothing
// to any sum, so passes after the first skip it. Of tiles beyond the bits a warpgroup takes all it can see.
template <int kWords, int kMembers>
struct LiveTiles {
  uint32_t bits[kMembers][kWords];

  LLA_WALK uint32_t word(int group, int index, TileRange visible) const {
    return index < kWords ? bits[group][index]
                          : bits_below(visible.end - 32 * index) & ~bits_below(visible.begin - 32 * index);
  }
  LLA_WALK int total(int count) const {
    int live = 0;
    for (int word = 0; word < kWords && word * 32 < count; ++word)
      live += detail::bit_count(bits[0][word] | bits[kMembers - 1][word]);
    return live + detail::larger(0, count - kWords * 32);
  }

 private:
  LLA_WALK static uint32_t bits_below(int n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; }
};

struct Alone {
  LLA_WALK static uint32_t same(uint32_t bits) { return bits; }
};

// Steps through the tiles that are live for a warpgroup, 32 of them in registers at a time. Together: Alone for the
// copying thread, WarpTogether for the warps that multiply, whose threads hold the same.
template <int kWords, int kMembers, class Together>
struct LiveWalk {
  const LiveTiles<kWords, kMembers>* map;
  TileRange visible[kMembers];  // of each warpgroup
  int count;                    // tiles of the item
  int tile = -1;
  uint32_t bits[kMembers] = {};

  // To the next live tile. Past the last one, `tile` is of no use.
  LLA_WALK void advance() {
    ++tile;
    while (tile < count) {
      if ((tile & 31) == 0) load();
      const uint32_t rest = (bits[0] | bits[kMembers - 1]) >> (tile & 31);
      if (rest != 0) {
        tile += detail::lowest_bit(rest);
        return;
      }
      tile = (tile | 31) + 1;
    }
  }
  // How many tiles from this one on a member takes without a gap; the walk moves to the last of them.
  LLA_WALK int run(int member) {
    const int first = tile;
    while (true) {
      const uint32_t gaps = ~bits[member] >> (tile & 31);
      if (gaps != 0) {
        tile += detail::lowest_bit(gaps) - 1;
        break;
      }
      tile |= 31;
      if (tile + 1 >= count) break;
      ++tile;
      load();
      if ((bits[member] & 1) == 0) {
        --tile;
        break;
      }
    }
    return detail::smaller(tile, count - 1) - first + 1;
  }
  LLA_WALK bool takes(int member) const { return (bits[member] >> (tile & 31)) & 1; }

 private:
  LLA_WALK void load() {
    for (int g = 0; g < kMembers; ++g) bits[g] = Together::same(map->word(g, tile >> 5, visible[g]));
  }
};

}  // namespace lla::cuda::sm90

#undef LLA_WALK
