// Short caches of few key heads: which calls have them, and who takes them. Decided by the call's shape and, on the device,
// by the lengths; never by the host's bounds, so that a graph captured for long caches is as quick when they are short.
#pragma once

#include <cstdint>

namespace lla::cuda::sm90::decode {

inline constexpr int kShortRows = 8;        // query heads of a key head that there is room for
inline constexpr int kMostShortRows = 4;    // more of them are quicker with a pass each
inline constexpr int kShortWeights = 1024;  // of a block: keys, whole slabs of them, times rows
inline constexpr int kMostCluster = 8;      // blocks of a key head: as many as any GPU has a place for
inline constexpr int kLeastCluster = 4;
static_assert(kMostShortRows <= kLeastCluster);  // each row is solved by a block of its own
inline constexpr int kSlabKeys = 64;
constexpr int short_slots(int dim) { return dim == 128 ? 5 : 14; }  // slabs in shared memory

// Blocks that share a key head's keys, with so many key heads in the call; 0: too many for this way. All clusters are to
// run at once, and a cluster wants its multiprocessors side by side: of 132 there is room for 15 clusters of eight.
constexpr int cluster_of(int64_t key_heads, int multiprocessors) {
  for (int cluster = kMostCluster; cluster >= kLeastCluster; cluster /= 2) {
    if (key_heads * cluster <= multiprocessors / 2) return cluster;
  }
  return 0;
}

// Keys of a block up to which it is quicker than one pass for every row, with so many rows of a key head (measured:
// docs/notebook/2026-11-19-hopper-decode-short.md). A block goes over its keys three times, and twice more for every row.
// Where pages have to be looked up for that again and again, only what fits into shared memory at once.
constexpr int short_keys_of_block(int rows, int dim, bool pages) {
  const int slabs = 768 / (rows + 1) / kSlabKeys, at_once = short_slots(dim) / 2;
  return kSlabKeys * (pages && at_once < slabs ? at_once : slabs);
}

constexpr bool weights_have_room() {
  for (int rows = 1; rows <= kMostShortRows; ++rows) {
    if (rows * short_keys_of_block(rows, 64, false) > kShortWeights) return false;
  }
  return kMostShortRows <= kShortRows;
}
static_assert(weights_have_room());

}  // namespace lla::cuda::sm90::decode
