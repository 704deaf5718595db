// Which tiles of an item the passes after the first visit, and the walk through them. Device functions for nvcc, plain
// ones for other compilers: the tests run them on the CPU.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/tensor/schedule.hpp"

#ifdef __CUDACC__
#define LLA_WALK __device__ __forceinline__
#define LLA_ROLLED _Pragma("unroll 1")
#else
#define LLA_WALK constexpr
#define LLA_ROLLED
#endif

namespace lla::cuda::tensor {

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

// Which tiles of an item have a non-zero weight, a bit per tile. A tile without one adds exactly nothing to any sum, so
// passes after the first skip it. Tiles beyond the bits are all taken.
template <int kWords>
struct LiveTiles {
  uint32_t bits[kWords];

  LLA_WALK uint32_t word(int index, int count) const {
    return index < kWords ? bits[index] : below(count - 32 * index);
  }
  LLA_WALK int total(int count) const {
    int live = 0;
    LLA_ROLLED
    for (int word = 0; word < kWords && word * 32 < count; ++word) live += detail::bit_count(bits[word]);
    return live + detail::larger(0, count - kWords * 32);
  }

 private:
  LLA_WALK static uint32_t below(int n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; }
};

struct Alone {
  LLA_WALK static uint32_t same(uint32_t bits) { return bits; }
};

// Steps through the live tiles, 32 of them in a register at a time. Together: Alone for the producer,
// WarpTogether for consumers, whose threads hold the same.
template <int kWords, class Together>
struct LiveWalk {
  const LiveTiles<kWords>* map;
  int count;  // tiles of the item
  int tile = -1;
  uint32_t bits = 0;

  // To the next live tile. Past the last one, `tile` is of no use.
  LLA_WALK void advance() {
    ++tile;
    while (tile < count) {
      if ((tile & 31) == 0) load();
      const uint32_t ahead = bits >> (tile & 31);
      if (ahead != 0) {
        tile += detail::lowest_bit(ahead);
        return;
      }
      tile = (tile | 31) + 1;
    }
  }
  // How many tiles from this one on are live without a gap; the walk moves to the last of them.
  LLA_WALK int run() {
    const int first = tile;
    while (true) {
      const uint32_t gaps = ~bits >> (tile & 31);
      if (gaps != 0) {
        tile += detail::lowest_bit(gaps) - 1;
        break;
      }
      tile |= 31;
      if (tile + 1 >= count) break;
      ++tile;
      load();
      if ((bits & 1) == 0) {
        --tile;
        break;
      }
    }
    return detail::smaller(tile, count - 1) - first + 1;
  }

 private:
  LLA_WALK void load() { bits = Together::same(map->word(tile >> 5, count)); }
};

}  // namespace lla::cuda::tensor

#undef LLA_WALK
#undef LLA_ROLLED
