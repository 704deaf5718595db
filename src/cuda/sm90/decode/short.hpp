// Short caches of few key heads: which calls have them, and who takes them. Decided by the call's shape and, on the device,
// by the lengths; never by the host's bounds, so that a graph captured for long caches is as quick when they are short.
#pragma once

#include <cstdint>

namespace lla::cuda::sm90::decode {

inline constexpr int kShortRows = 8;        // query heads of a key head, at most
inline constexpr int kShortWeights = 4096;  // of a block: keys times rows
inline constexpr int kMostCluster = 8;      // blocks of a key head: as many as any GPU has a place for

// Blocks that share a key head's keys, with so many key heads in the call; 0: too many for this way.
constexpr int cluster_of(int64_t key_heads, int multiprocessors) {
  for (int cluster = kMostCluster; cluster >= 4; cluster /= 2) {
    if (key_heads * cluster <= multiprocessors) return cluster;
  }
  return 0;
}

// Keys up to which it pays, with so many rows of a key head.
constexpr int32_t short_keys(int rows, int cluster) {
  const int of_block = kShortWeights / rows / 64 * 64;
  return cluster * (of_block < 1024 ? of_block : 1024);
}

}  // namespace lla::cuda::sm90::decode
