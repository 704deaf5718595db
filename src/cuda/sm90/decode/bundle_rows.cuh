// Four rows of a bundle with x given, in one warp: their logits, e = k.x, weights and sums, sixteen keys at a time, on
// the tensor cores (mma.sync).
//
// The sixteen rows of a product's left operand are q and x of the four rows, x in three parts that make it up exactly
// (to 24 bits): products of 16-bit numbers are exact in fp32. Beside the values the sixteen are w and w (e - centre),
// in two parts each. Threads whose lane is below 16 hold q, the first part of x, and w; the others the rest: lane and
// lane ^ 16 have the same row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/decode/load.cuh"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::sm90::decode {

inline constexpr int kQuadRows = 4;
inline constexpr float kWeightSlack = 8;  // bits a logit may exceed the maximum by before the sums follow

template <class C>
struct RowQuad {
  // fp16 weights: the largest lie in the upper part of its range. bf16 has fp32's.
  static constexpr float kLift = C::kBf16 ? 0 : 6;

  uint32_t operand[C::kDim / 16][4];
  float sums[C::kChunks][4];  // Σ w v, or Σ w (e - centre) v; the last two of each are the lesser parts
  float total;                // the same without v, of this thread's keys
  float max, centre;          // max in log2 units; both of this thread's row
  float x_scale, e_scale;     // powers of two, 1 for bf16
  Keys keys;                  // that the row sees

  __device__ __forceinline__ static bool low() { return threadIdx.x % 32 < 16; }
  __device__ __forceinline__ static int row() { return threadIdx.x % 32 / 4 % kQuadRows; }
  // Of sixteen keys, this thread's: 2t, 2t + 1, 2t + 8, 2t + 9.
  __device__ __forceinline__ static int key_at(int i) { return (i / 2) * 8 + threadIdx.x % 4 * 2 + i % 2; }
  __device__ __forceinline__ static float exchange(float x) { return __shfl_xor_sync(0xffffffffu, x, 16); }

  // `query_x`: q and x of this thread's row.
  __device__ __forceinline__ void begin(const float2* query_x, const Keys& seen) {
    const int t = threadIdx.x % 4;
    x_scale = 1;
    if constexpr (!C::kBf16) {
      float largest = 0;
#pragma unroll 4
      for (int d = t; d < C::kDim; d += 4) largest = fmaxf(largest, fabsf(query_x[d].y));
      x_scale = tensor::power_of_two_scale(keys_max(largest));
    }
#pragma unroll
    for (int i = 0; i < C::kDim / 8; ++i) {
      const float2 a = query_x[8 * i + 2 * t], b = query_x[8 * i + 2 * t + 1];
      const float xa = a.y * x_scale, xb = b.y * x_scale;
      const uint32_t first = narrow_pair<C::kBf16>(xa, xb);
      const float2 from_first = widen_pair<C::kBf16>(first);
      const float ra = xa - from_first.x, rb = xb - from_first.y;
      const uint32_t second = narrow_pair<C::kBf16>(ra, rb);
      const float2 from_second = widen_pair<C::kBf16>(second);
      const uint32_t third = narrow_pair<C::kBf16>(ra - from_second.x, rb - from_second.y);
      operand[i / 2][i % 2 * 2] = low() ? narrow_pair<C::kBf16>(a.x, b.x) : second;
      operand[i / 2][i % 2 * 2 + 1] = low() ? first : third;
    }
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
    total = 0, max = -INFINITY, centre = 0, e_scale = 1;
    keys = seen;
  }

  // The sums relative to a larger maximum, E relative to the heaviest key's: where that has nearly all the weight,
  // nothing cancels. Each row for itself.
  __device__ __forceinline__ void follow(const float (&logit)[4], const float (&e)[4], float top) {
    const float largest = keys_max(top);
    const bool mine = largest > max + kWeightSlack, fresh = max == -INFINITY;
    float heaviest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) heaviest = logit[i] == largest ? fmaxf(heaviest, e[i]) : heaviest;
    heaviest = keys_max(heaviest);
    const float factor = !mine ? 1 : fresh ? 0 : exp2_fast(max - largest);
    const float by = mine && !fresh && !low() ? (centre - heaviest) * e_scale : 0;
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(by, exchange(sums[i][j]), sums[i][j]) * factor;
    }
    total = fmaf(by, exchange(total), total) * factor;
    if (mine) max = largest, centre = heaviest;
  }

  // fp16's range for w (e - centre): a row that leaves it goes on with a smaller scale.
  __device__ __forceinline__ void shrink(float (&u)[4]) {
    const float own = fmaxf(fmaxf(fabsf(u[0]), fabsf(u[1])), fmaxf(fabsf(u[2]), fabsf(u[3])));
    if (!__any_sync(0xffffffffu, own > 0x1p15f)) return;
    float largest = keys_max(own);
    const float other = exchange(largest);
    largest = low() ? other : largest;
    const bool mine = largest > 0x1p15f && largest <= 3e38f;
    const float factor = mine ? tensor::power_of_two_scale(largest) * 0x1p-6f : 1;
    e_scale *= factor;
    const float own_factor = low() ? 1 : factor;
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] *= own_factor;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] *= own_factor;
    total *= own_factor;
  }

  // From products with sixteen keys to the left operand for their values. `edge`: not every row sees every key;
  // `poisoned`: keys whose values are not finite (and have been cleared), as bits.
  __device__ __forceinline__ void weigh(uint32_t (&weights)[4], const float (&product)[2][4], float scale, int first,
                                        bool edge, uint32_t poisoned) {
    float logit[4], e[4];
    const float per_x = 1 / x_scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float lesser = product[i / 2][2 + i % 2];
      const float mine = low() ? product[i / 2][i % 2] : product[i / 2][i % 2] + lesser;
      const float other = exchange(mine), first_part = exchange(lesser);
      logit[i] = (low() ? mine : other) * scale;
      e[i] = (low() ? lesser + other : first_part + mine) * per_x;
    }
    if (edge) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + key_at(i);
        if (key < keys.begin || key >= keys.end) {
          logit[i] = -INFINITY, e[i] = 0;
        } else if (poisoned >> key_at(i) & 1) {
          total = NAN;
        }
      }
    }
    const float top = fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));
    if (__any_sync(0xffffffffu, top > max + kWeightSlack)) follow(logit, e, top);
    const float base = max == -INFINITY ? 0 : max - kLift;
    float u[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float w = exp2_fast(logit[i] - base);
      u[i] = low() ? w : w * ((e[i] - centre) * e_scale);
    }
    if constexpr (!C::kBf16) shrink(u);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float a = u[2 * h], b = u[2 * h + 1];
      weights[2 * h] = narrow_pair<C::kBf16>(a, b);
      const float2 rounded = widen_pair<C::kBf16>(weights[2 * h]);
      weights[2 * h + 1] = narrow_pair<C::kBf16>(a - rounded.x, b - rounded.y);
      // What the values are multiplied by, not what it was before rounding: the mean of e then is that of the sums.
      const float2 lesser = widen_pair<C::kBf16>(weights[2 * h + 1]);
      total += (rounded.x + lesser.x) + (rounded.y + lesser.y);
    }
  }
};

}  // namespace lla::cuda::sm90::decode
