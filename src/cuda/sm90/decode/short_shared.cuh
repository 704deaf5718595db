// A block of the kernel for short caches (short.cuh): its share of a key head's keys and values, in slabs.
#pragma once

#include "cuda/sm90/decode/conjugate.cuh"
#include "cuda/sm90/decode/doubt.cuh"
#include "cuda/sm90/decode/short.hpp"

namespace lla::cuda::sm90::decode {

inline constexpr int kSlabKeys = 64, kSlabTiles = kSlabKeys / kWarpKeys;

template <int kDim_>
struct ShortConfig {
  static constexpr int kDim = kDim_, kChunks = kDim / 8;
  static constexpr int kBlockBytes = kSlabKeys * 128;  // of 64 columns
  static constexpr int kSlabBytes = kSlabKeys * kDim * 2;
  static constexpr int kSlots = kDim == 128 ? 4 : 12;
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
    float4 sums[C::kSumFours];                      // of a row's covariance, for the others of the cluster
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
  unsigned largest_key, largest_value;  // bits of 16-bit numbers without sign, which are in order
  int32_t bad;
};
inline constexpr size_t kMostShared = 227 * 1024;
static_assert(sizeof(ShortShared<64>) <= kMostShared && sizeof(ShortShared<128>) <= kMostShared);

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

  __device__ __forceinline__ int slot_of(int visit) const {
    if (!resident) return visit % C::kSlots;
    return visit < passes * slabs ? visit % slabs : slabs + visit % slabs;
  }

  // Sixteen bytes a thread at a time, zeros behind the last key.
  __device__ void load(int visit) {
    const bool value = visit >= passes * slabs;
    const core::Operand& operand = value ? p.cache.v : p.cache.k;
    const int width = value ? p.value_dim : p.dim, from = visit % slabs * kSlabKeys;
    unsigned char* const slot = s.slot[slot_of(visit)];
    const uint16_t* const base = static_cast<const uint16_t*>(operand.data) + kv_head * operand.stride[2];
    constexpr int kStep = kSolveThreads / C::kChunks;  // keys at a time
    const int chunk = threadIdx.x % C::kChunks;
    const auto at_key = [&](int key) -> int64_t {  // -1: nothing is there
      if (from + key >= keys) return -1;
      const int2 at = place(first_key + from + key);
      invalid |= at.x < 0;
      return at.x < 0 ? -1 : at.x * operand.stride[0] + at.y * operand.stride[1];
    };
    if (p.cache.vectors) {
#pragma unroll
      for (int key = threadIdx.x / C::kChunks; key < kSlabKeys; key += kStep) {
        const int64_t at = at_key(key);
        const bool there = at >= 0 && 8 * chunk < width;
        copy_ahead(slot + raw_offset<C::kBlockBytes>(key, chunk), base + (there ? at + 8 * chunk : 0), there);
      }
      return;
    }
#pragma unroll 1
    for (int key = threadIdx.x / C::kChunks; key < kSlabKeys; key += kStep) {
      const int64_t at = at_key(key);
      uint32_t words[4]{};
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        const int column = 8 * chunk + d;
        if (at >= 0 && column < width) words[d / 2] |= uint32_t{base[at + column * operand.stride[3]]} << d % 2 * 16;
      }
      *reinterpret_cast<uint4*>(slot + raw_offset<C::kBlockBytes>(key, chunk)) = {words[0], words[1], words[2], words[3]};
    }
  }
  __device__ __forceinline__ int2 place(int key) const {
    if (!p.cache.table) return {batch, key};
    return page_of(p.cache, key, p.cache.table[batch * p.cache.table_stride + key / p.cache.page_size]);
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
