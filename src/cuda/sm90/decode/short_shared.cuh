// A block of the kernel for short caches (short.cuh): its share of a key head's keys and values, in slabs.
#pragma once

#include "cuda/sm90/decode/conjugate.cuh"
#include "cuda/sm90/decode/doubt.cuh"
#include "cuda/sm90/decode/short.hpp"

namespace lla::cuda::sm90::decode {

inline constexpr int kSlabTiles = kSlabKeys / kWarpKeys;

template <int kDim_>
struct ShortConfig {
  static constexpr int kDim = kDim_, kChunks = kDim / 8;
  static constexpr int kBlockBytes = kSlabKeys * 128;  // of 64 columns
  static constexpr int kSlabBytes = kSlabKeys * kDim * 2;
  static constexpr int kStep = kSolveThreads / kChunks;  // keys that all threads bring at a time
  static_assert(kStep % 8 == 0);                         // of the swizzle
  static constexpr int kSlots = short_slots(kDim);
  // A covariance is symmetric: of its blocks of 16 x 16 channels a warp has those of its own sixteen rows with the next
  // kOffsets - 1 columns, cyclically; of the last offset half of the warps have one.
  static constexpr int kBlocks = kDim / 16, kOffsets = kBlocks / 2 + 1, kPairs = kBlocks * (kBlocks + 1) / 2;
  static constexpr int kTeams = kSolveThreads / 32 / kBlocks;  // of warps, that take tiles in turn
  static constexpr int kSumFours = kPairs * 2 * 32;            // a pair's two halves, a lane's four numbers
  static constexpr int kKeyGroups = 2 * kSolveThreads / kDim;  // of threads, with two columns of values each
};

template <int kDim>
struct ShortShared {
  using C = ShortConfig<kDim>;
  static constexpr int kTerms = kShortRows * 2 * kDim;  // Σ w v and Σ w e v of every row
  alignas(1024) unsigned char slot[C::kSlots][C::kSlabBytes];
  union {
    Square<kDim> square;
    Matrix<kDim> matrix;
  };
  GradientsShared<kDim> gradients;
  union {
    float4 sums[C::kSumFours];                        // of a row's covariance, for the others of the cluster
    float column_sums[kSlabTiles][kShortRows][kDim];  // of keys, by tile
    float terms[C::kKeyGroups][kTerms];
  };
  alignas(16) float weight[kShortWeights];  // logits, then weights relative to this block's largest
  alignas(16) float e[kShortWeights];       // (k - mean).x, then times the weight
  alignas(16) uint16_t query[kShortRows][kDim];
  alignas(16) float whole_mean[kShortRows][kDim];  // of all
  union {
    alignas(16) float mean[kShortRows][kDim];  // of this block's keys
    alignas(16) float x[kShortRows][kDim];     // later
  };
  alignas(16) float own_x[kDim];  // of the row that this block solves
  union {
    float from_mean[kMostCluster][kDim];  // means of the blocks, from that of all
    float output[kTerms];
  };
  float tops[kSlabTiles][kShortRows];
  float max[kShortRows], omega[kShortRows], omega_e[kShortRows];
  float factor[kShortRows][kMostCluster];  // of a block's sums, relative to the whole row's weights
  float share[kShortRows][kMostCluster];   // of the row's weights
  int32_t invalid;
  int32_t bad;
  unsigned largest_value;  // of some values, as bits of a 16-bit number without sign, which are in order
};
inline constexpr size_t kMostShared = 227 * 1024;
static_assert(sizeof(ShortShared<64>) <= kMostShared && sizeof(ShortShared<128>) <= kMostShared);

// What a thread brings of a slab (Slabs) where keys lie in pages or are not for copies of sixteen bytes: from key `first`
// on, of which the cache has so many. Returns whether a page is missing. Code of its own: it is long, and needed seldom.
template <int kDim>
__device__ __attribute__((noinline)) bool load_slab_slowly(const Cache& cache, const core::Operand& operand, int width,
                                                           const uint16_t* base, int batch, int first, int keys,
                                                           unsigned char* to) {
  using C = ShortConfig<kDim>;
  const int chunk = threadIdx.x % C::kChunks;
  bool missing = false;
#pragma unroll 1
  for (int i = 0; i < kSlabKeys; i += C::kStep) {
    int2 at{-1, 0};
    if (i < keys) {
      at = {batch, first + i};
      if (cache.table) at = page_of(cache, at.y, cache.table[batch * cache.table_stride + at.y / cache.page_size]);
      missing |= at.x < 0;
    }
    const uint16_t* const from = base + (at.x < 0 ? 0 : at.x * operand.stride[0] + at.y * operand.stride[1]);
    if (cache.vectors) {
      const bool there = at.x >= 0 && 8 * chunk < width;
      copy_ahead(to + i * 128, there ? from + 8 * chunk : base, there);
      continue;
    }
    uint32_t words[4]{};
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      const int column = 8 * chunk + d;
      if (at.x >= 0 && column < width) words[d / 2] |= uint32_t{from[column * operand.stride[3]]} << d % 2 * 16;
    }
    *reinterpret_cast<uint4*>(to + i * 128) = {words[0], words[1], words[2], words[3]};
  }
  return missing;
}

// A block's slabs, in the order in which they are visited: all keys as often as a pass needs them, then all values. Where
// all fit they are brought once, else again, from L2, as slots become free.
template <int kDim>
struct Slabs {
  using C = ShortConfig<kDim>;
  ShortShared<kDim>& s;
  const Params& p;
  const int batch, kv_head, first_key, keys;  // of this block
  const int passes;                           // over the keys
  const int slabs = (keys + kSlabKeys - 1) / kSlabKeys;
  const bool resident = 2 * slabs <= C::kSlots;
  bool invalid = false;

  // A thread brings sixteen bytes of a key, the same of every kStep keys.
  const int chunk = threadIdx.x % C::kChunks, own_key = threadIdx.x / C::kChunks;
  const uint32_t own_place = raw_offset<C::kBlockBytes>(own_key, chunk);

  __device__ __forceinline__ int slot_of(int visit) const {
    if (!resident) return visit % C::kSlots;
    return visit < passes * slabs ? visit % slabs : slabs + visit % slabs;
  }

  // Zeros behind the last key.
  __device__ __forceinline__ void load(int visit) {
    const bool value = visit >= passes * slabs;
    const core::Operand& operand = value ? p.cache.v : p.cache.k;
    const int width = value ? p.value_dim : p.dim, key = visit % slabs * kSlabKeys + own_key;
    const uint16_t* const base = static_cast<const uint16_t*>(operand.data) + kv_head * operand.stride[2];
    unsigned char* const to = s.slot[slot_of(visit)] + own_place;
    if (p.cache.table || !p.cache.vectors) {
      invalid |= load_slab_slowly<kDim>(p.cache, operand, width, base, batch, first_key + key, keys - key, to);
      return;
    }
    const int64_t stride = operand.stride[1];
    const uint16_t* from = base + batch * operand.stride[0] + (first_key + key) * stride + 8 * chunk;
    const bool inside = 8 * chunk < width;
#pragma unroll
    for (int i = 0; i < kSlabKeys; i += C::kStep, from += C::kStep * stride) {
      const bool there = inside && key + i < keys;
      copy_ahead(to + i * 128, there ? from : base, there);
    }
  }
  // Of what fits, keys and values are a group of copies each; else every visit's are, asked for kSlots - 1 visits ahead.
  __device__ void begin() {
    if (!resident) {
#pragma unroll 1
      for (int visit = 0; visit < C::kSlots - 1; ++visit) load(visit), end_group_ahead();
      return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int slab = 0; slab < slabs; ++slab) load(half * passes * slabs + slab);
      end_group_ahead();
    }
  }
  // A pass over its visits: of slab i, what lies there and its first key of this block's.
  template <class Visit>
  __device__ __forceinline__ void each(int pass, const Visit& look_at) {
    if (resident && pass == 0) wait_groups_ahead<1>(), __syncthreads();
    if (resident && pass == passes) wait_groups_ahead<0>(), __syncthreads();
#pragma unroll 1
    for (int i = 0; i < slabs; ++i) {
      const int visit = pass * slabs + i;
      if (!resident) {
        wait_groups_ahead<C::kSlots - 2>();
        __syncthreads();  // all have this slab, and nobody looks at the last one any more
        const int next = visit + C::kSlots - 1;
        if (next < (passes + 1) * slabs) load(next);
        end_group_ahead();
      }
      look_at(s.slot[slot_of(visit)], i * kSlabKeys);
    }
  }
};

}  // namespace lla::cuda::sm90::decode
