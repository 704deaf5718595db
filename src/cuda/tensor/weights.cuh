// Softmax weights of a tile as fp16 pairs in the order wgmma takes its left operand, and products of weights with E.
//
// W = fp16(2^15 exp2(logit - M)), M an integer bound of the row's logits: the same bits in every pass, and the weight
// everywhere (sums, means, matrix). Word i holds elements 2i and 2i + 1 of the score fragment, of row i % 2.
#pragma once

#include "cuda/tensor/fragment.cuh"
#include "cuda/tensor/ptx.cuh"
#include "cuda/tensor/schedule.hpp"

namespace lla::cuda::tensor {

inline constexpr float kWeightExponent = 15;
inline constexpr float kWeightScale = 32768;
// M may be so much above the largest logit: the scale of E makes up for it, as far as fp16 goes.
inline constexpr float kLooseBits = 13;

// What turns a thread's raw scores into logits.
struct RowLogits {
  Pair<float> scale;  // raw score -> log2 units
  Pair<float> shift;  // 15 - M
};

// Scores of keys a row does not see become -inf.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&scores)[kKeys / 2], const Pair<KeyRange>& visible, int first_key,
                                            const Lane& lane) {
  const int first = first_key + lane.column;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin = visible[r].begin - first, end = visible[r].end - first;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      const int key = 8 * (i / 2) + (i & 1), e = 4 * (i / 2) + 2 * r + (i & 1);
      if (key < begin || key >= end) scores[e] = -INFINITY;
    }
  }
}

// 2^15 exp2(logit - M) in place of the raw scores, and its rounding to fp16.
template <int kKeys>
__device__ __forceinline__ void exponentiate_scores(float (&scores)[kKeys / 2], const RowLogits& rows) {
#pragma unroll
  for (int e = 0; e < kKeys / 2; ++e)
    scores[e] = exp2_fast(fmaf(scores[e], rows.scale[row_of(e)], rows.shift[row_of(e)]));
}
template <int kKeys>
__device__ __forceinline__ void pack_scores(uint32_t (&words)[kKeys / 4], const float (&scores)[kKeys / 2]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) words[i] = pack(scores[2 * i], scores[2 * i + 1]);
}
template <int kKeys>
__device__ __forceinline__ void make_weights(uint32_t (&weights)[kKeys / 4], float (&scores)[kKeys / 2],
                                             const RowLogits& rows) {
  exponentiate_scores<kKeys>(scores, rows);
  pack_scores<kKeys>(weights, scores);
}

// Row sums of fp16 words. (Products with ones, mma.sync, would take a tenth of the instructions, but wait for the other
// warpgroup's products.)
template <int kKeys>
__device__ __forceinline__ void add_row_sums(Pair<float>& sums, const uint32_t (&words)[kKeys / 4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const float2 w = unpack(words[i]);
    sums[i & 1] += w.x + w.y;
  }
}

// U = W (E scale - centre) in place of E, not yet rounded.
template <int kKeys>
__device__ __forceinline__ void weight_scores(float (&e)[kKeys / 2], const uint32_t (&weights)[kKeys / 4],
                                              const Pair<float>& scale, const Pair<float>& centre) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const int row = i & 1;
    const float2 w = unpack(weights[i]);
    e[2 * i] = w.x * fmaf(e[2 * i], scale[row], -centre[row]);
    e[2 * i + 1] = w.y * fmaf(e[2 * i + 1], scale[row], -centre[row]);
  }
}

// The same in fp16, two roundings and half the instructions: C = fp16(E scale - centre), then U = fp16(W C).
template <int kKeys>
__device__ __forceinline__ void centre_scores(uint32_t (&centred)[kKeys / 4], const float (&e)[kKeys / 2],
                                              const Pair<float>& scale, const Pair<float>& centre) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const int row = i & 1;
    centred[i] = pack(fmaf(e[2 * i], scale[row], -centre[row]), fmaf(e[2 * i + 1], scale[row], -centre[row]));
  }
}
template <int kWords>
__device__ __forceinline__ void multiply_words(uint32_t (&products)[kWords], const uint32_t (&a)[kWords],
                                               const uint32_t (&b)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) products[i] = multiply_pairs(a[i], b[i]);
}

// What is left of U beyond its words.
template <int kKeys>
__device__ __forceinline__ void subtract_words(float (&u)[kKeys / 2], const uint32_t (&words)[kKeys / 4]) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const float2 w = unpack(words[i]);
    u[2 * i] -= w.x;
    u[2 * i + 1] -= w.y;
  }
}

// Cached weights of a resident block: tile by tile, each warpgroup's 16-key slabs, 16 bytes a thread, written and read
// by the same thread. The copy engine brings a warpgroup's part of a tile back as it lies.
template <int kKeys>
struct WeightCache {
  static constexpr int kSlabs = kKeys / 16;
  static constexpr int kWarpgroupVectors = kSlabs * kWarpgroupThreads;  // of a tile and warpgroup
  static constexpr uint32_t kWarpgroupBytes = kWarpgroupVectors * sizeof(uint4);

  __device__ __forceinline__ static uint4* at(uint4* block, int tile, int warpgroup) {
    return block + (int64_t{tile} * 2 + warpgroup) * kWarpgroupVectors;
  }
  __device__ __forceinline__ static void store(uint4* to, const uint32_t (&weights)[kKeys / 4], int thread) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      to[s * kWarpgroupThreads + thread] =
          make_uint4(weights[4 * s], weights[4 * s + 1], weights[4 * s + 2], weights[4 * s + 3]);
    }
  }
  __device__ __forceinline__ static void load(uint32_t (&weights)[kKeys / 4], const uint4* from, int thread) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      const uint4 v = from[s * kWarpgroupThreads + thread];
      weights[4 * s] = v.x, weights[4 * s + 1] = v.y, weights[4 * s + 2] = v.z, weights[4 * s + 3] = v.w;
    }
  }
  // Made of all that was loaded. Not ~0: no weight is negative.
  __device__ __forceinline__ static uint32_t all(const uint32_t (&weights)[kKeys / 4]) {
    uint32_t bits = ~0u;
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) bits &= weights[4 * s];
    return bits;
  }
};

}  // namespace lla::cuda::tensor
