// Conjugate gradients on the rows of a warpgroup, vectors in fragment order.
//
// Units: keys are scaled by κ (a power of two), so r = κ q - mean and x carry a factor κ, and the matrix in the step is
// the true one, (1/κ²) Σ w (k - mean)(k - mean)ᵀ / ω + Λ. The direction is rounded to fp16 with a power of two per row,
// and the rounded vector is the direction that is used: the step length is the exact minimiser along it, (r·p) /
// (p·Ap).
#pragma once

#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/scale.hpp"
#include "lla/lla.h"

namespace lla::cuda::sm90 {

// Curvature below this fraction of the largest one seen is rounding. Where λ itself is that small, a direction the keys
// do not reach shows the rounding of p instead: up to 2^-17 of the largest.
__device__ __forceinline__ float least_curvature(float ridge, float largest) {
  return ridge < 0x1p-21f * largest ? 0x1p-16f : 0x1p-23f;
}
// |r|² beyond this many times the first is divergence: with λ above that bound it grows by a few hundred at most.
inline constexpr float kMostGrowth = 0x1p20f;

// What turns raw products of an fp16 direction with keys into scaled, centred E: all a pass over the keys needs of it.
struct Direction {
  Pair<float> scale;  // |E scale - centre| is at most 1, so W times it fits fp16
  Pair<float> centre;
};

// Of the two rows of a thread (the four threads of a quad hold the same).
struct Solve {
  Pair<float> rr;  // |r|²
  Pair<float> rr_start;
  Pair<float> curvature;  // largest p·Ap / |p|²
  Pair<float> omega;
  Pair<float> ridge;         // the row's, or its smallest
  Pair<float> inverse;       // true direction = fp16 direction * inverse, a power of two
  Pair<float> norm_squared;  // |p|² of the fp16 direction
  Pair<float> rp;            // r·p
  Pair<int> iterations;
  Pair<int> status;  // lla_row_status
  Pair<bool> active;
};

// A pass over the keys needs every register: what it does not use waits in scratch memory, a quarter of the two rows'
// state in each thread of a quad.
struct SolveMemory {
  __device__ __forceinline__ static void store(float4* to, const Solve& s, const Lane& lane) {
    float4 part[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t exponent = __float_as_uint(s.inverse[r]) >> 23;
      const uint32_t flags =
          static_cast<uint32_t>(s.iterations[r]) << 11 | exponent << 3 | s.status[r] << 1 | s.active[r];
      part[2 * r] = make_float4(s.rr[r], s.rr_start[r], s.curvature[r], __uint_as_float(flags));
      part[2 * r + 1] = make_float4(s.omega[r], s.ridge[r], s.norm_squared[r], s.rp[r]);
    }
    const int t = lane.column / 2;
    *to = t == 0 ? part[0] : t == 1 ? part[1] : t == 2 ? part[2] : part[3];
  }
  __device__ __forceinline__ static void load(const float4* from, Solve& s, const Lane& lane) {
    unpack(*from, s, lane);
  }
  __device__ __forceinline__ static void unpack(const float4& mine, Solve& s, const Lane& lane) {
    const int quad = lane.thread % 32 & ~3;
    const auto fetch = [&](float v, int t) { return __shfl_sync(0xffffffffu, v, quad + t); };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      s.rr[r] = fetch(mine.x, 2 * r), s.rr_start[r] = fetch(mine.y, 2 * r), s.curvature[r] = fetch(mine.z, 2 * r);
      const uint32_t flags = __float_as_uint(fetch(mine.w, 2 * r));
      s.iterations[r] = static_cast<int>(flags >> 11), s.status[r] = flags >> 1 & 3, s.active[r] = flags & 1;
      s.inverse[r] = __uint_as_float((flags >> 3 & 255) << 23);
      s.omega[r] = fetch(mine.x, 2 * r + 1), s.ridge[r] = fetch(mine.y, 2 * r + 1);
      s.norm_squared[r] = fetch(mine.z, 2 * r + 1), s.rp[r] = fetch(mine.w, 2 * r + 1);
    }
  }
};

template <class T>
__device__ __forceinline__ T& tile_word(void* tile, uint32_t offset) {
  return *reinterpret_cast<T*>(static_cast<char*>(tile) + offset);
}

// The step's chain of scalars is latency that nothing hides: approximations (to an ulp or two) where an exact quotient
// or root is not needed.
__device__ __forceinline__ float fast_sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_divide(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
}
__device__ __forceinline__ float inverse_power_of_two(float x) {
  return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// The bound |E| <= 2 |p| max|k| fixes the scale of U before any tile is seen. An error of the centre shifts all E of a
// row alike, which the row-sum correction takes out again: the mean may be rounded.
__device__ __forceinline__ void finish_direction(Direction& d, const Pair<float>& norm_squared, const Pair<float>& dots,
                                                 float largest_key_norm) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    d.scale[r] = power_of_two_below(2.001f * fast_sqrt(norm_squared[r]) * largest_key_norm);
    d.centre[r] = dots[r] * d.scale[r];
  }
}

// v, rounded to fp16 with a power of two per row, as the words a product takes: the first direction, r = v. With kSplit
// what rounding left over goes into the tile `low`: x in the output pass.
template <int kDim, bool kSplit = false>
__device__ __forceinline__ void make_direction(uint32_t (&p)[kDim / 4], const float (&v)[kDim / 2],
                                               const float (&mean)[kDim / 2], __half* low, const Lane& lane,
                                               float largest_key_norm, Solve& s, Direction& d) {
  Pair<float> largest = {0, 0}, scale;
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], fabsf(v[e]));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    scale[r] = power_of_two_scale(quad_max(largest[r]));
    s.inverse[r] = inverse_power_of_two(scale[r]);
  }
  Pair<float> dots = {0, 0}, squares = {0, 0}, rp = {0, 0};
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int r = i & 1;
    const float a = v[2 * i] * scale[r], b = v[2 * i + 1] * scale[r];
    p[i] = pack(a, b);
    float2 rounded = unpack(p[i]);
    if constexpr (kSplit) {
      const uint32_t rest = pack(a - rounded.x, b - rounded.y);
      const float2 rounded_rest = unpack(rest);
      tile_word<uint32_t>(low, lane.tile_offset(i / 2, r)) = rest;
      rounded.x += rounded_rest.x;
      rounded.y += rounded_rest.y;
    }
    squares[r] += rounded.x * rounded.x + rounded.y * rounded.y;
    dots[r] += rounded.x * mean[2 * i] + rounded.y * mean[2 * i + 1];
    rp[r] += rounded.x * v[2 * i] + rounded.y * v[2 * i + 1];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    s.norm_squared[r] = quad_sum(squares[r]);
    s.rp[r] = quad_sum(rp[r]);
    dots[r] = quad_sum(dots[r]);
  }
  finish_direction(d, s.norm_squared, dots, largest_key_norm);
}

// r = rhs; rows that are not solved (already zero, no keys, NaN) have active = false and get a zero direction.
template <int kDim>
__device__ __forceinline__ void start_solve(Solve& solve, float (&r)[kDim / 2]) {
  Pair<float> squares = {0, 0};
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) squares[row_of(e)] = fmaf(r[e], r[e], squares[row_of(e)]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    solve.rr[i] = solve.rr_start[i] = quad_sum(squares[i]);
    solve.curvature[i] = 0;
    solve.iterations[i] = 0;
    solve.status[i] = LLA_ROW_OK;
    solve.active[i] = solve.active[i] && solve.rr[i] > 0;
  }
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) r[e] = solve.active[row_of(e)] ? r[e] : 0.0f;
}

struct StepLimits {
  float tolerance_squared;
  int least_iterations, max_iterations;
};

// Where a thread's parts of a warpgroup's vectors are, in fragment order.
struct Vectors {
  float* r;             // in shared memory
  float* x;             // in global memory, only added to
  const float* ridges;  // λ per dimension (+inf: projected out); null where a row has one λ
};

// x += step of one thread's four elements: nothing waits for it, and no other thread touches them.
__device__ __forceinline__ void add_to(float4* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Of the largest λ in units of the data part: beyond, x is zero to rounding, and p·Ap would overflow.
inline constexpr float kLargestRidge = 0x1p80f;

// product += Λ p with a λ per dimension, in units of the data part, and p·Λp. Where λ is +inf the product is zero; the
// mean key is too.
template <int kDim>
__device__ __forceinline__ void add_ridges(float (&product)[kDim / 2], uint32_t (&p)[kDim / 4], Pair<float>& curvature,
                                           const float* ridges, const Pair<float>& inverse_scale, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    if (i % 4 == 0) keep_order();
    const float4 l4 = reinterpret_cast<const float4*>(ridges)[i * kWarpgroup + lane.thread];
    const float2 v0 = unpack(p[2 * i]), v1 = unpack(p[2 * i + 1]);
    const float l[4] = {l4.x, l4.y, l4.z, l4.w}, v[4] = {v0.x, v0.y, v1.x, v1.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = fminf(l[j] * inverse_scale[j / 2], kLargestRidge);
      product[4 * i + j] = l[j] == INFINITY ? 0.0f : fmaf(scaled, v[j], product[4 * i + j]);
      curvature[j / 2] = l[j] == INFINITY ? curvature[j / 2] : fmaf(scaled * v[j], v[j], curvature[j / 2]);
    }
  }
  forget(p);
}

// p·product of a thread's elements.
template <int kDim>
__device__ __forceinline__ void dot_direction(Pair<float>& dots, const float (&product)[kDim / 2],
                                              uint32_t (&p)[kDim / 4]) {
  dots[0] = dots[1] = 0;
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const float2 v = unpack(p[i]);
    dots[i & 1] = fmaf(v.x, product[2 * i], fmaf(v.y, product[2 * i + 1], dots[i & 1]));
  }
  forget(p);
}

// One step from product = Σ U k and its row sums: A p = data_scale (product - sums mean) + Λ p.
// p holds the direction, and then the next one. `curvature`: a thread's part of p·product, taken while what is loaded
// here and by the caller was under way. Updates x, r and the rows' state.
template <int kDim>
__device__ __forceinline__ void step(Solve& s, float (&product)[kDim / 2], Pair<float>& curvature,
                                     const Pair<float>& sums, const Pair<float>& data_scale, uint32_t (&mean)[kDim / 4],
                                     uint32_t (&p)[kDim / 4], const Vectors& at, const Lane& lane,
                                     float largest_key_norm, const StepLimits& limits, Direction& d) {
  constexpr int kWords = kDim / 4, kQuads = kDim / 8;
  // Everything in units of the data part: the scale comes in with the step length.
  Pair<float> ridge, inverse_scale;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    inverse_scale[h] = data_scale[h] > 0 ? fast_divide(1.0f, data_scale[h]) : 0.0f;
    ridge[h] = at.ridges == nullptr ? fminf(s.ridge[h] * inverse_scale[h], kLargestRidge) : 0.0f;
  }
  if (at.ridges != nullptr) add_ridges<kDim>(product, p, curvature, at.ridges, inverse_scale, lane);

  Pair<float> alpha, residual_step;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // p·(product - sums mean + λ p), of which p·mean and |p|² are known.
    const float dot_mean = d.scale[h] > 0 ? d.centre[h] * inverse_power_of_two(d.scale[h]) : 0.0f;
    const float pap =
        fmaf(ridge[h], s.norm_squared[h], fmaf(-sums[h], dot_mean, quad_sum(curvature[h]))) * data_scale[h];
    const float relative = fast_divide(pap, s.norm_squared[h]);
    s.curvature[h] = fmaxf(s.curvature[h], relative);
    alpha[h] = fast_divide(s.rp[h], pap);
    if (s.active[h] &&
        !(relative > least_curvature(s.ridge[h], s.curvature[h]) * s.curvature[h] && fabsf(alpha[h]) < 0x1p126f)) {
      s.active[h] = false;
      s.status[h] = LLA_ROW_BREAKDOWN;
    }
    if (!s.active[h]) alpha[h] = 0;
    residual_step[h] = -alpha[h] * data_scale[h];
    s.iterations[h] += s.active[h];
  }

  float4* const residuals = reinterpret_cast<float4*>(at.r) + lane.thread;
  float4* const xs = reinterpret_cast<float4*>(at.x) + lane.thread;
  Pair<float> rr = {0, 0};
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (i % 4 == 0) keep_order();
    const float4 old = residuals[i * kWarpgroup];
    const float2 v0 = unpack(p[2 * i]), v1 = unpack(p[2 * i + 1]), m0 = unpack(mean[2 * i]),
                 m1 = unpack(mean[2 * i + 1]);
    float* const r = &product[4 * i];
    r[0] = fmaf(ridge[0], v0.x, fmaf(-sums[0], m0.x, r[0]));
    r[1] = fmaf(ridge[0], v0.y, fmaf(-sums[0], m0.y, r[1]));
    r[2] = fmaf(ridge[1], v1.x, fmaf(-sums[1], m1.x, r[2]));
    r[3] = fmaf(ridge[1], v1.y, fmaf(-sums[1], m1.y, r[3]));
    r[0] = s.active[0] ? fmaf(residual_step[0], r[0], old.x) : old.x;
    r[1] = s.active[0] ? fmaf(residual_step[0], r[1], old.y) : old.y;
    r[2] = s.active[1] ? fmaf(residual_step[1], r[2], old.z) : old.z;
    r[3] = s.active[1] ? fmaf(residual_step[1], r[3], old.w) : old.w;
    rr[0] = fmaf(r[0], r[0], fmaf(r[1], r[1], rr[0]));
    rr[1] = fmaf(r[2], r[2], fmaf(r[3], r[3], rr[1]));
    residuals[i * kWarpgroup] = make_float4(r[0], r[1], r[2], r[3]);
    add_to(xs + i * kWarpgroup, alpha[0] * v0.x, alpha[0] * v0.y, alpha[1] * v1.x, alpha[1] * v1.y);
  }

  Pair<float> beta, scale;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float now = quad_sum(rr[h]);
    beta[h] = fast_divide(now, s.rr[h]) * s.inverse[h];
    if (s.active[h]) {
      s.rr[h] = now;
      const bool solved = s.iterations[h] >= limits.least_iterations || now <= 1e-16f * s.rr_start[h];
      if (now <= limits.tolerance_squared * s.rr_start[h] && solved) {
        s.active[h] = false;
      } else if (s.iterations[h] >= limits.max_iterations) {
        s.active[h] = false;
        s.status[h] = LLA_ROW_MAX_ITERATIONS;
      } else if (!(now < kMostGrowth * s.rr_start[h])) {
        s.active[h] = false;
        s.status[h] = LLA_ROW_BREAKDOWN;
      }
    }
    // |r + β p| <= |r| + β |p| bounds the elements; fp16 has exponents to spare for the slack.
    scale[h] = power_of_two_scale(1.001f * (fast_sqrt(now) + beta[h] * fast_sqrt(s.norm_squared[h])));
    s.inverse[h] = inverse_power_of_two(scale[h]);
    if (!s.active[h]) scale[h] = beta[h] = 0;
  }
  Pair<float> dots = {0, 0}, squares = {0, 0}, rp = {0, 0};
  forget(p);
  forget(mean);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int h = i & 1;
    const float2 old = unpack(p[i]), m = unpack(mean[i]);
    p[i] = pack(fmaf(beta[h], old.x, product[2 * i]) * scale[h], fmaf(beta[h], old.y, product[2 * i + 1]) * scale[h]);
    const float2 v = unpack(p[i]);
    squares[h] = fmaf(v.x, v.x, fmaf(v.y, v.y, squares[h]));
    rp[h] = fmaf(v.x, product[2 * i], fmaf(v.y, product[2 * i + 1], rp[h]));
    dots[h] = fmaf(v.x, m.x, fmaf(v.y, m.y, dots[h]));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    s.norm_squared[h] = quad_sum(squares[h]);
    s.rp[h] = quad_sum(rp[h]);
    dots[h] = quad_sum(dots[h]);
  }
  finish_direction(d, s.norm_squared, dots, largest_key_norm);
}

}  // namespace lla::cuda::sm90
