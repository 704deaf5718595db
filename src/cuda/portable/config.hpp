// Tile sizes, and what follows from them. Host code: the planner and its tests read the same numbers as the kernels.
//
// A block owns a few rows (queries, or keys in the pass that sums over queries) and walks over tiles of the other side.
// Sixteen threads, half a warp, work on each owned row, so sums along a row are four shuffles and a row's weights pass
// from the product that makes them to the product that uses them without a block-wide barrier.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lla::cuda::portable {

inline constexpr int kLargestDim = 256;
// Shared memory a block may ask for on every GPU from compute capability 8.0 on (8.6, 8.9 and 12.x have the least).
inline constexpr int64_t kSharedMemoryLimit = 99 * 1024;
inline constexpr int kLanes = 16;  // threads per owned row

// T is the arithmetic type, kDim the bound on head dimensions a kernel is compiled for.
template <class T, int kDim>
struct Config {
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(T));
  // Small rows: two owned rows and two rows of the other side per thread. Large: one, so that five tiles still fit.
  static constexpr int kRows = kRowBytes <= 512 ? 2 : 1;
  static constexpr int kRowTeams = kRowBytes <= 1024 ? 16 : 8;
  static constexpr int kThreads = kRowTeams * kLanes;
  static constexpr int kOwn = kRowTeams * kRows;
  static constexpr int kOther = kLanes * kRows;
  static constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements of a 16-byte access
  static constexpr int kColumns = kDim / (kLanes * kVec);        // accesses per thread and row
  // The weights of a tile; padded so that the two rows of a warp lie in different banks.
  static constexpr int kWeightStride = kOther + kVec;
  static constexpr size_t kOwnBytes = size_t{1} * kOwn * kRowBytes;
  static constexpr size_t kOtherBytes = size_t{1} * kOther * kRowBytes;
  static constexpr size_t kWeightBytes = size_t{1} * kOwn * kWeightStride * sizeof(T);
  // Per row of the other side: what the pass over queries keeps of each (seven values, two mask bounds, a kind and
  // an exponent).
  static constexpr size_t kRowDataBytes = size_t{80} * (kOwn > kOther ? kOwn : kOther);

  static constexpr size_t shared_bytes(int own_tiles, int other_tiles) {
    return own_tiles * kOwnBytes + other_tiles * kOtherBytes + kWeightBytes + kRowDataBytes;
  }
};

// The dimensions kernels are compiled for; a problem takes the first that holds D and Dv.
constexpr int dim_bucket(int64_t dim, int64_t value_dim) {
  const int64_t largest = dim > value_dim ? dim : value_dim;
  return largest <= 64 ? 64 : largest <= 128 ? 128 : 256;
}

// Calls f with an integral constant of the bucket.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <class F>
auto with_bucket(int bucket, F&& f) {
  switch (bucket) {
    case 64: return f(Constant<64>{});
    case 128: return f(Constant<128>{});
    default: return f(Constant<256>{});
  }
}

// The direct solver: one row of queries at a time per block, everything in double.
struct DirectConfig {
  static constexpr int kThreads = 256;
  static constexpr int kKeys = 16;  // keys per tile

  static constexpr int64_t padded(int64_t dim) { return (dim + 3) / 4 * 4; }
  // The lower triangle of A with the right-hand side as one more block of rows.
  static constexpr int64_t matrix_elements(int64_t dim) { return (padded(dim) + 4) * (padded(dim) + 5) / 2; }
  // Everything else it keeps: the key tile, five vectors of keys and two of values, the tile's scalars, the row list.
  static constexpr size_t vector_bytes(int64_t dim) {
    const int64_t n = padded(dim) + 4;
    return static_cast<size_t>((kKeys * n + 5 * n + 2 * kLargestDim + 4 * kKeys) * 8 + kThreads * 4);
  }
  static constexpr bool matrix_in_shared(int64_t dim) {
    return matrix_elements(dim) * 8 + static_cast<int64_t>(vector_bytes(dim)) <= kSharedMemoryLimit;
  }
  static constexpr size_t shared_bytes(int64_t dim) {
    return vector_bytes(dim) + (matrix_in_shared(dim) ? static_cast<size_t>(matrix_elements(dim)) * 8 : 0);
  }
};

}  // namespace lla::cuda::portable
