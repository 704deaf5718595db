// Conjugate gradients on the rows of a warpgroup, vectors in fragment order.
//
// Units: keys are scaled by κ (a power of two), so r = κ q - mean and x carry a factor κ, and the matrix in the step is the
// true one, (1/κ²) Σ w (k - mean)(k - mean)ᵀ / ω + Λ. The direction is rounded to fp16 with a power of two per row, and the
// rounded vector is the direction that is used: the step length is the exact minimiser along it, (r·p) / (p·Ap).
#pragma once

#include "cuda/sm90/fragment.cuh"
#include "cuda/sm90/scale.hpp"
#include "lla/lla.h"

namespace lla::cuda::sm90 {

// Curvature below this fraction of the largest one seen is rounding.
inline constexpr float kLeastCurvature = 0x1p-23f;

// A vector per row as fp16, and what turns raw products with keys into scaled, centred E.
struct Direction {
  Pair<float> inverse;       // true vector = fp16 vector * inverse
  Pair<float> norm_squared;  // of the fp16 vector
  Pair<float> scale;         // E scale - centre is at most 1 in magnitude, so W times it fits fp16
  Pair<float> centre;
};

// Of the two rows of a thread (the four threads of a quad hold the same).
struct Solve {
  Pair<float> rr;  // |r|²
  Pair<float> rr_start;
  Pair<float> curvature;  // largest p·Ap / |p|²
  Pair<float> omega;
  Pair<float> ridge;
  Pair<int> iterations;
  Pair<int> status;  // lla_row_status
  Pair<bool> active;
};

// A pass over the keys needs every register: what it does not use waits in the thread's own corner of the scratch memory.
struct SolveMemory {
  static constexpr int kVectors = 4;  // of 16 bytes, per thread

  __device__ __forceinline__ static void store(float4* to, const Solve& s, const Direction& d) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int flags = s.iterations[r] << 3 | s.status[r] << 1 | static_cast<int>(s.active[r]);
      to[(2 * r) * kWarpgroup] = make_float4(s.rr[r], s.rr_start[r], s.curvature[r], __int_as_float(flags));
      to[(2 * r + 1) * kWarpgroup] = make_float4(s.omega[r], s.ridge[r], d.inverse[r], d.norm_squared[r]);
    }
  }
  __device__ __forceinline__ static void load(const float4* from, Solve& s, Direction& d) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 a = from[(2 * r) * kWarpgroup], b = from[(2 * r + 1) * kWarpgroup];
      s.rr[r] = a.x, s.rr_start[r] = a.y, s.curvature[r] = a.z;
      const int flags = __float_as_int(a.w);
      s.iterations[r] = flags >> 3, s.status[r] = flags >> 1 & 3, s.active[r] = flags & 1;
      s.omega[r] = b.x, s.ridge[r] = b.y, d.inverse[r] = b.z, d.norm_squared[r] = b.w;
    }
  }
};

template <class T>
__device__ __forceinline__ T& tile_word(void* tile, uint32_t offset) {
  return *reinterpret_cast<T*>(static_cast<char*>(tile) + offset);
}

// The bound |E| <= 2 |p| max|k| fixes the scale of U before any tile is seen.
__device__ __forceinline__ void finish_direction(Direction& d, const Pair<float>& dots, float largest_key_norm) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    d.scale[r] = power_of_two_below(2.001f * sqrtf(d.norm_squared[r]) * largest_key_norm);
    d.centre[r] = dots[r] * d.scale[r];
  }
}

template <int kDim>
__device__ __forceinline__ void row_scales(const float (&v)[kDim / 2], Pair<float>& scale, Pair<float>& inverse) {
  Pair<float> largest = {0, 0};
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], fabsf(v[e]));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    scale[r] = power_of_two_scale(quad_max(largest[r]));
    inverse[r] = 1.0f / scale[r];
  }
}

// Writes v, rounded, into the warpgroup's tile. With kSplit what rounding left over goes into `low` (x in the output pass).
template <int kDim, bool kSplit = false>
__device__ __forceinline__ void write_direction(const float (&v)[kDim / 2], const float (&mean)[kDim / 2], __half* tile,
                                                __half* low, const Lane& lane, float largest_key_norm, Direction& d) {
  Pair<float> scale;
  row_scales<kDim>(v, scale, d.inverse);
  Pair<float> dots = {0, 0}, squares = {0, 0};
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int r = i & 1;
    const float a = v[2 * i] * scale[r], b = v[2 * i + 1] * scale[r];
    const uint32_t word = pack(a, b);
    float2 rounded = unpack(word);
    tile_word<uint32_t>(tile, lane.tile_offset(i / 2, r)) = word;
    if constexpr (kSplit) {
      const uint32_t rest = pack(a - rounded.x, b - rounded.y);
      const float2 rounded_rest = unpack(rest);
      tile_word<uint32_t>(low, lane.tile_offset(i / 2, r)) = rest;
      rounded.x += rounded_rest.x;
      rounded.y += rounded_rest.y;
    }
    squares[r] += rounded.x * rounded.x + rounded.y * rounded.y;
    dots[r] += rounded.x * mean[2 * i] + rounded.y * mean[2 * i + 1];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    d.norm_squared[r] = quad_sum(squares[r]);
    dots[r] = quad_sum(dots[r]);
  }
  finish_direction(d, dots, largest_key_norm);
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
  int max_iterations;
};

// Ap = (product - sums mean) scale + Λ p in place of product = Σ U k. `ridges` is λ per dimension in fragment order (+inf:
// the dimension is projected out), or null where a row has one λ.
template <int kDim>
__device__ __forceinline__ void finish_product(float (&product)[kDim / 2], const Pair<float>& sums, const Pair<float>& scale,
                                               const float (&mean)[kDim / 2], __half* tile, const Pair<float>& ridge,
                                               const float* ridges, const Lane& lane) {
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) product[e] = fmaf(-sums[row_of(e)], mean[e], product[e]) * scale[row_of(e)];
  if (ridges == nullptr) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      if (i % 8 == 0) keep_order();
      const float2 v = unpack(tile_word<uint32_t>(tile, lane.tile_offset(i / 2, i & 1)));
      product[2 * i] = fmaf(ridge[i & 1], v.x, product[2 * i]);
      product[2 * i + 1] = fmaf(ridge[i & 1], v.y, product[2 * i + 1]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    if (i % 8 == 0) keep_order();
    const float2 l = reinterpret_cast<const float2*>(ridges)[(i / 2 * kWarpgroup + lane.thread) * 2 + i % 2];
    const float2 v = unpack(tile_word<uint32_t>(tile, lane.tile_offset(i / 2, i & 1)));
    product[2 * i] = l.x == INFINITY ? 0.0f : fmaf(l.x, v.x, product[2 * i]);
    product[2 * i + 1] = l.y == INFINITY ? 0.0f : fmaf(l.y, v.y, product[2 * i + 1]);
  }
}

// One step, with ap = A p (see finish_product). Updates x, r, the rows' state, and writes the next direction into `tile`.
template <int kDim>
__device__ __forceinline__ void step(Solve& solve, float (&product)[kDim / 2], const float (&mean)[kDim / 2], float* residual,
                                     float* x, __half* tile, const Lane& lane, float largest_key_norm, const StepLimits& limits, Direction& d) {
  constexpr int kQuads = kDim / 8;
  float4* const residuals = reinterpret_cast<float4*>(residual) + lane.thread;
  float4* const xs = reinterpret_cast<float4*>(x) + lane.thread;
  const auto direction = [&](int word) { return unpack(tile_word<uint32_t>(tile, lane.tile_offset(word / 2, word & 1))); };
  Pair<float> pap = {0, 0}, rp = {0, 0};
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (i % 4 == 0) keep_order();
    const float4 r = residuals[i * kWarpgroup];
    const float2 p0 = direction(2 * i), p1 = direction(2 * i + 1);
    pap[0] = fmaf(p0.x, product[4 * i], fmaf(p0.y, product[4 * i + 1], pap[0]));
    pap[1] = fmaf(p1.x, product[4 * i + 2], fmaf(p1.y, product[4 * i + 3], pap[1]));
    rp[0] = fmaf(p0.x, r.x, fmaf(p0.y, r.y, rp[0]));
    rp[1] = fmaf(p1.x, r.z, fmaf(p1.y, r.w, rp[1]));
  }
  Pair<float> alpha;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    pap[h] = quad_sum(pap[h]);
    rp[h] = quad_sum(rp[h]);
    const float curvature = pap[h] / d.norm_squared[h];
    solve.curvature[h] = fmaxf(solve.curvature[h], curvature);
    alpha[h] = rp[h] / pap[h];
    if (solve.active[h] && !(curvature > kLeastCurvature * solve.curvature[h] && fabsf(alpha[h]) < 0x1p126f)) {
      solve.active[h] = false;
      solve.status[h] = LLA_ROW_BREAKDOWN;
    }
    if (!solve.active[h]) alpha[h] = 0;
    solve.iterations[h] += solve.active[h];
  }
  Pair<float> rr = {0, 0};
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    if (i % 4 == 0) keep_order();
    const float4 r4 = residuals[i * kWarpgroup];
    float r[4] = {r4.x, r4.y, r4.z, r4.w};
    const float4 x4 = xs[i * kWarpgroup];
    float xv[4] = {x4.x, x4.y, x4.z, x4.w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pf = direction(2 * i + h);
      const float pv[2] = {pf.x, pf.y};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int q = 2 * h + c;
        xv[q] = fmaf(alpha[h], pv[c], xv[q]);
        if (solve.active[h]) r[q] = fmaf(-alpha[h], product[4 * i + q], r[q]);
        rr[h] = fmaf(r[q], r[q], rr[h]);
        product[4 * i + q] = r[q];
      }
    }
    residuals[i * kWarpgroup] = make_float4(r[0], r[1], r[2], r[3]);
    xs[i * kWarpgroup] = make_float4(xv[0], xv[1], xv[2], xv[3]);
  }
  Pair<float> beta;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float now = quad_sum(rr[h]);
    beta[h] = now / solve.rr[h] * d.inverse[h];
    if (solve.active[h]) {
      solve.rr[h] = now;
      if (now <= limits.tolerance_squared * solve.rr_start[h]) {
        solve.active[h] = false;
      } else if (solve.iterations[h] >= limits.max_iterations) {
        solve.active[h] = false;
        solve.status[h] = LLA_ROW_MAX_ITERATIONS;
      } else if (!(now < INFINITY)) {
        solve.active[h] = false;
        solve.status[h] = LLA_ROW_BREAKDOWN;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    if (i % 8 == 0) keep_order();
    const float2 pf = direction(i);
    const bool on = solve.active[i & 1];
    product[2 * i] = on ? fmaf(beta[i & 1], pf.x, product[2 * i]) : 0.0f;
    product[2 * i + 1] = on ? fmaf(beta[i & 1], pf.y, product[2 * i + 1]) : 0.0f;
  }
  write_direction<kDim>(product, mean, tile, nullptr, lane, largest_key_norm, d);
}

}  // namespace lla::cuda::sm90
