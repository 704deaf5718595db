// Conjugate gradients on the rows of a warpgroup, vectors in fragment order.
//
// Units: keys are scaled by κ (a power of two), and so is all that is made of them: r = κ q - mean, the matrix
// Σ w (k - mean)(k - mean)ᵀ / ω + κ² Λ, and x, which is 1/κ of the true one. So keys of any size give the same bits.
// The direction is rounded to fp16 with a power of two per row, and the rounded vector is the direction that is used:
// the step length is the exact minimiser along it, (r·d) / (d·Ad).
#pragma once

#include "cuda/tensor/fragment.cuh"
#include "cuda/tensor/ptx.cuh"
#include "cuda/tensor/scale.hpp"
#include "lla/lla.h"

namespace lla::cuda::tensor {

// Curvature below this fraction of the largest one seen is rounding. Where λ itself is that small, a direction the keys
// do not reach shows the rounding of d instead: up to 2^-17 of the largest.
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
  Pair<float> curvature;  // largest d·Ad / |d|²
  Pair<float> omega;
  Pair<float> ridge;         // κ² λ of the row, or its smallest
  Pair<float> inverse;       // true direction = fp16 direction * inverse, a power of two
  Pair<float> norm_squared;  // |d|² of the fp16 direction
  Pair<float> rd;            // r·d
  Pair<int> iterations;
  Pair<int> status;  // lla_row_status
  Pair<bool> active;
  Pair<int> loose;  // bits that M is above the tight bound of the logits: weights are smaller by so many
};

// What the rows' solutions are like, from which follows how small a residual must be, and what rounding may have done
// to them.
struct Course {
  Pair<float> size;   // forward: Σ w E² of the solution so far; backward: its |x|²
  Pair<float> along;  // x·d of the fp16 direction; after the forward's solve sum_noise_squared
  // Known before the solve: in the forward how far from 0 and 1 a row's largest weight is, in the backward x·(q - mean
  // key) of the forward's x.
  Pair<float> note;
  Pair<float> steps;  // Σ w E² of every step whose U was multiplied in one part, added up
};

// A pass over the keys needs every register: what it does not use of the rows' state waits in scratch memory, three
// vectors a row: what the end of a step changes, the rest, and the solution's course. All threads of a quad read those
// of both rows.
struct SolveMemory {
  using Words = float4[2][2];

  __device__ __forceinline__ static void store(float4* warpgroup, const Solve& s, const Lane& lane) {
    store_changed(warpgroup, s, lane);
    *place(warpgroup, 1, second(lane), lane) =
        make_float4(own(s.rr_start, lane), own(s.omega, lane), own(s.ridge, lane), own(s.curvature, lane));
    __syncwarp();
  }
  __device__ __forceinline__ static void store_curvature(float4* warpgroup, const Pair<float>& curvature,
                                                         const Lane& lane) {
    __syncwarp();  // all have read
    place(warpgroup, 1, second(lane), lane)->w = own(curvature, lane);
  }
  __device__ __forceinline__ static void store_changed(float4* warpgroup, const Solve& s, const Lane& lane) {
    Pair<float> flags;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t exponent = __float_as_uint(s.inverse[r]) >> 23;
      flags[r] = __uint_as_float(static_cast<uint32_t>(s.iterations[r]) << 17 | s.loose[r] << 13 | exponent << 4 |
                                 s.status[r] << 1 | s.active[r]);
    }
    *place(warpgroup, 0, second(lane), lane) =
        make_float4(own(s.rr, lane), own(s.norm_squared, lane), own(s.rd, lane), own(flags, lane));
    __syncwarp();
  }
  __device__ __forceinline__ static void fetch(Words& words, const float4* warpgroup, const Lane& lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = *place(warpgroup, i / 2, i % 2, lane);
  }
  __device__ __forceinline__ static void unpack(const Words& words, Solve& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 &a = words[0][r], &b = words[1][r];
      const uint32_t flags = __float_as_uint(a.w);
      s.rr[r] = a.x, s.norm_squared[r] = a.y, s.rd[r] = a.z;
      s.iterations[r] = static_cast<int>(flags >> 17), s.status[r] = flags >> 1 & 7, s.active[r] = flags & 1;
      s.loose[r] = flags >> 13 & 15;
      s.inverse[r] = __uint_as_float((flags >> 4 & 255) << 23);
      s.rr_start[r] = b.x, s.omega[r] = b.y, s.ridge[r] = b.z, s.curvature[r] = b.w;
    }
  }
  __device__ __forceinline__ static void load(const float4* warpgroup, Solve& s, const Lane& lane) {
    Words words;
    fetch(words, warpgroup, lane);
    unpack(words, s);
  }
  __device__ __forceinline__ static void store_course(float4* warpgroup, const Course& c, const Lane& lane) {
    *place(warpgroup, 2, second(lane), lane) =
        make_float4(own(c.size, lane), own(c.along, lane), own(c.note, lane), own(c.steps, lane));
    __syncwarp();
  }
  __device__ __forceinline__ static void fetch_course(Course& c, const float4* warpgroup, const Lane& lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4 v = *place(warpgroup, 2, r, lane);
      c.size[r] = v.x, c.along[r] = v.y, c.note[r] = v.z, c.steps[r] = v.w;
    }
  }

 private:
  // Two threads of a quad write the first row's, two the second's.
  __device__ __forceinline__ static bool second(const Lane& lane) { return lane.column & 2; }
  __device__ __forceinline__ static float own(const Pair<float>& of, const Lane& lane) {
    return second(lane) ? of[1] : of[0];
  }
  template <class Word>
  __device__ __forceinline__ static Word* place(Word* warpgroup, int vector, int row, const Lane& lane) {
    return warpgroup + (2 * vector + row) * (kWarpgroupRows / 2) + lane.thread / 4;
  }
};

template <class T>
__device__ __forceinline__ T& tile_word(void* tile, uint32_t offset) {
  return *reinterpret_cast<T*>(static_cast<char*>(tile) + offset);
}

// The step's chain of scalars is latency that nothing hides: fast_sqrt and fast_reciprocal where an exact quotient or
// root is not needed.
__device__ __forceinline__ float inverse_power_of_two(float x) {
  return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// 2^e for e from 0 to 15.
__device__ __forceinline__ float small_power(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

// The bound |E| <= 2 |d| max|k| fixes the scale of U before any tile is seen; where weights are small because M is
// loose, E may be larger. An error of the centre shifts all E of a row alike, which the row-sum correction takes out
// again: the mean may be rounded.
__device__ __forceinline__ void finish_direction(Direction& d, const Pair<float>& norm_squared, const Pair<float>& dots,
                                                 float largest_key_norm, const Pair<int>& loose) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    d.scale[r] = power_of_two_below(2.001f * fast_sqrt(norm_squared[r]) * largest_key_norm) * small_power(loose[r]);
    d.centre[r] = dots[r] * d.scale[r];
  }
}

// Powers of two that bring a vector's rows near fp16's upper end.
template <int kDim>
__device__ __forceinline__ void scale_rows(Pair<float>& scale, const float (&v)[kDim / 2]) {
  Pair<float> largest = {0, 0};
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) largest[row_of(e)] = fmaxf(largest[row_of(e)], fabsf(v[e]));
#pragma unroll
  for (int r = 0; r < 2; ++r) scale[r] = power_of_two_scale(quad_max(largest[r]));
}

// v, rounded to fp16 with a power of two per row, as the words a product takes: the first direction, r = v.
template <int kDim>
__device__ __forceinline__ void make_direction(uint32_t (&direction)[kDim / 4], const float (&v)[kDim / 2],
                                               const float (&mean)[kDim / 2], float largest_key_norm, Solve& s,
                                               Direction& d) {
  Pair<float> scale;
  scale_rows<kDim>(scale, v);
  Pair<float> dots = {0, 0}, squares = {0, 0}, rd = {0, 0};
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int r = i & 1;
    const float a = v[2 * i] * scale[r], b = v[2 * i + 1] * scale[r];
    direction[i] = pack(a, b);
    const float2 rounded = unpack(direction[i]);
    squares[r] += rounded.x * rounded.x + rounded.y * rounded.y;
    dots[r] += rounded.x * mean[2 * i] + rounded.y * mean[2 * i + 1];
    rd[r] += rounded.x * v[2 * i] + rounded.y * v[2 * i + 1];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    s.inverse[r] = inverse_power_of_two(scale[r]);
    s.norm_squared[r] = quad_sum(squares[r]);
    s.rd[r] = quad_sum(rd[r]);
    dots[r] = quad_sum(dots[r]);
  }
  finish_direction(d, s.norm_squared, dots, largest_key_norm, s.loose);
}

// r = rhs; rows that are not solved (already zero, no keys, NaN) have active = false and get a zero direction.
template <int kDim>
__device__ __forceinline__ void start_solve(Solve& solve, float (&r)[kDim / 2]) {
  Pair<float> squares = {0, 0};
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) squares[row_of(e)] = fmaf(r[e], r[e], squares[row_of(e)]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float rr = quad_sum(squares[i]);
    solve.curvature[i] = 0;
    solve.iterations[i] = 0;
    solve.loose[i] = 0;
    solve.status[i] = LLA_ROW_OK;
    solve.active[i] = solve.active[i] && rr > 0;
    solve.rr[i] = solve.rr_start[i] = solve.active[i] ? rr : 0.0f;  // nothing to solve: nothing is left unsolved
  }
#pragma unroll
  for (int e = 0; e < kDim / 2; ++e) r[e] = solve.active[row_of(e)] ? r[e] : 0.0f;
}

// What rounding U once may have done to |r|², which the steps do not see: 2^-12 sqrt(Σ w² E²) |k| for every step, at
// random. Of Σ w E² (`steps`) that sum is at most twice min(w, 1 - w) of the largest weight (`balance`); with many keys
// it is far less.
__device__ __forceinline__ float drift_squared(float balance, float steps, float largest_key_norm) {
  return 0x1p-24f * balance * steps * (largest_key_norm * largest_key_norm);
}

// Whether that shows: in the output, where the steps' U are far larger than the solution's (`size`: its Σ w E²), or in
// the residual. From emulation: every peaked kind is above these limits, of ordinary data some rows with few keys and
// anisotropic keys at small λ.
__device__ __forceinline__ bool drift_shows(float tolerance_squared, float start, float balance, float steps,
                                            float size, float largest_key_norm) {
  constexpr float kOrdinary = 1e-6f;  // the default tolerance, squared
  const float most_steps = 8 * fminf(fast_sqrt(tolerance_squared / kOrdinary), 1.0f);
  return balance * steps > most_steps * (1 + fmaxf(size, 0.0f)) ||
         drift_squared(balance, steps, largest_key_norm) > 64 * fmaxf(tolerance_squared, kOrdinary) * start;
}

// What fp32 leaves undecided of E = x·k, squared: twice 2^-24 of what a sum of `dim` products with random signs is made
// of, and of x·mean, which every such sum passes through. |x| |k| would be a bound, and far from what is seen.
__device__ __forceinline__ float sum_noise_squared(float x_squared, float x_mean, float largest_key_norm, int dim) {
  const float random = x_squared * (largest_key_norm * largest_key_norm) / static_cast<float>(dim);
  return 0x1p-46f * fmaf(x_mean, x_mean, random);
}

// How much of that noise a row's output shows, against |v| + |o|; `value` is the head's largest, about four times a
// usual one, `output` the row's. Above most_told the row is not to be trusted, whatever its residual. The factor was
// found on an H200: with it no OK row of 28,912 is off by more than 1 % (docs/notebook/2026-11-16-hopper-rounding.md).
__device__ __forceinline__ float shown_noise(float noise_squared, float balance, float output, float value) {
  return value > 0 ? 9 * sqrtf(balance * noise_squared) * (value / (value + 4 * output)) : 0.0f;
}

// What a row's |r| / |right-hand side| is said to be: with the drift; with what rounding the weights by 2^-12 does,
// which is that of the right-hand side and, where 1 + E is large or weights are small (M is loose), up to eight times
// that; and with what the noise of E makes of W E k where x is long (few keys, a small λ): w |k - mean|² of a key is at
// most the trace of the covariance, which `dim` times the largest curvature bounds: one long key without weight counts
// for nothing; and with what fp16 leaves of weights below its normal numbers, 2^-25 at most and at random: nothing, but
// where x is long and M loose, so that `omega` is small, E of many `keys` of hardly any weight makes it count. One key,
// or nothing to solve: -1.
__device__ __forceinline__ float told_residual(const Solve& s, int row, float balance, float steps, float size,
                                               float noise_squared, float largest_key_norm, int dim, int keys) {
  const float start = s.rr_start[row], key = largest_key_norm * largest_key_norm;
  if (!(start > 0)) return -1.0f;
  const float large = fmaxf(balance * (1 + fmaxf(size, 0.0f)) * key, s.loose[row] > 7 ? 15 * start : 0.0f);
  const float weights = 0x1p-24f * (start + fminf(63 * start, large));
  const float sums = noise_squared * fminf(balance * key, static_cast<float>(dim) * s.curvature[row]);
  // (2^-24 / omega)² / 12 for every key, times E², of which noise_squared is 2^-46.
  const float tiny = noise_squared * key * static_cast<float>(keys) / (48 * s.omega[row] * s.omega[row]);
  return sqrtf((s.rr[row] + weights + drift_squared(balance, steps, largest_key_norm) + sums + tiny) / start);
}

struct StepLimits {
  float tolerance_squared;
  int least_iterations, max_iterations;
  // |r|² is also to be below `share_squared` of what the results are made of (core::StopRule), but need not be below
  // `least_squared` of the first. In the forward that is 4 λ (1 + Σ w E²), in the backward |λ x|².
  float share_squared, least_squared;

  template <bool kBackward>
  __device__ __forceinline__ float wanted(float start, float ridge, float size) const {
    const float left = kBackward ? ridge * ridge * size : 4 * ridge * (1 + fmaxf(size, 0.0f));
    return fminf(tolerance_squared * start, fmaxf(share_squared * left, least_squared * start));
  }
};

// Where a thread's parts of a warpgroup's vectors are, in fragment order.
struct Vectors {
  float* r;             // in shared memory
  float* x;             // in global memory, only added to
  const float* ridges;  // in global memory: κ² λ per dimension (+inf: projected out)
  bool per_dim;         // whether there are any
};

// What a step reads beside the product and the direction. A pass asks for it a tile before its end, but only into L1,
// which has room for it: registers that are loaded at the end of every run of tiles are spilled.
template <int kDim>
struct StepInputs {
  float4* state;
  const uint4* mean;

  __device__ __forceinline__ void prefetch(const Lane& lane) const {
    constexpr int kSectors = 16;  // of 32 bytes: a warp's part of a vector of the mean key
    const int warp = lane.thread / 32, half = lane.thread / kSectors % 2, sector = lane.thread % kSectors;
    const int own = min(lane.thread % 32, 23);  // of its rows' state: three vectors of two rows, four sectors each
    touch(state + own / 4 * (kWarpgroupRows / 2) + warp * 8 + own % 4 * 2);
#pragma unroll
    for (int i = 0; i < Fragment<kDim>::kHalfVectors; i += 2) {
      touch(mean + (i + half) * kWarpgroupThreads + warp * 32 + sector * 2);
    }
  }
};

// Of the largest λ in units of the data part: beyond, x is zero to rounding, and d·Ad would overflow.
inline constexpr float kLargestRidge = 0x1p80f;

// κ² λ; what is infinite, negative or NaN stays so, and nothing else becomes infinite.
__device__ __forceinline__ float scaled_ridge(float lambda, float key_scale) {
  return lambda < INFINITY ? fminf(lambda * key_scale * key_scale, 0x1p120f) : lambda;
}

// product += Λ d with a λ per dimension, in units of the data part. Where λ is +inf the product is zero; the mean key
// is too.
template <int kDim>
__device__ __forceinline__ void add_ridges(float (&product)[kDim / 2], const uint32_t (&direction)[kDim / 4],
                                           const float* ridges, const Pair<float>& data_units, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    if (i % 4 == 0) keep_order();
    const float4 l4 = reinterpret_cast<const float4*>(ridges)[i * kWarpgroupThreads + lane.thread];
    const float2 v0 = unpack(direction[2 * i]), v1 = unpack(direction[2 * i + 1]);
    const float l[4] = {l4.x, l4.y, l4.z, l4.w}, v[4] = {v0.x, v0.y, v1.x, v1.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = fminf(l[j] * data_units[j / 2], kLargestRidge);
      product[4 * i + j] = l[j] == INFINITY ? 0.0f : fmaf(scaled, v[j], product[4 * i + j]);
    }
  }
}

// The power of two s with s² square in [2^28, 2^30); exponents as in power_of_two_scale.
__device__ __forceinline__ float scale_of_square(float square) {
  const int exponent = (static_cast<int>(__float_as_uint(square) >> 23) - 127) >> 1;
  return __uint_as_float(static_cast<uint32_t>(min(max(14 - exponent, -62), 62) + 127) << 23);
}

// ---- a step, stage by stage ------------------------------------------------------------------------------------------

// The direction as numbers, and d·product. Of dot products there are two chains each: one would take four cycles an
// element.
template <int kDim>
__device__ __forceinline__ void open_direction(float (&v)[kDim / 2], Pair<float>& curvature,
                                               const uint32_t (&direction)[kDim / 4],
                                               const float (&product)[kDim / 2]) {
  float chains[2][2] = {};
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const float2 words = unpack(direction[i]);
    v[2 * i] = words.x, v[2 * i + 1] = words.y;
    chains[i & 1][0] = fmaf(words.x, product[2 * i], chains[i & 1][0]);
    chains[i & 1][1] = fmaf(words.y, product[2 * i + 1], chains[i & 1][1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) curvature[h] = chains[h][0] + chains[h][1];
}

// How far a step goes, by row: x += x d, r += product (Σ U k) + mean k̄ + direction d.
struct Stride {
  Pair<float> x, product, mean, direction;
};

// The minimiser along d. Rows without curvature left break down, and they and those that have stopped stand still.
__device__ __forceinline__ void find_stride(Stride& stride, Solve& s, Course& course, const Pair<float>& data_units,
                                            const Pair<float>& ridge, const Pair<float>& sums,
                                            const Pair<float>& energy, bool two_parts) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // d·(product - sums mean + λ d), of which d·mean and |d|² are known.
    const float dad = fmaf(ridge[h], s.norm_squared[h], energy[h]);
    const float relative = dad * fast_reciprocal(data_units[h] * s.norm_squared[h]);
    const float largest = fmaxf(s.curvature[h], relative);
    const float length = s.rd[h] * fast_reciprocal(dad);
    stride.x[h] = length * data_units[h];
    const bool good =
        s.active[h] && relative > least_curvature(s.ridge[h], largest) * largest && fabsf(stride.x[h]) < 0x1p126f;
    s.status[h] = s.active[h] && !good ? LLA_ROW_BREAKDOWN : s.status[h];
    s.curvature[h] = largest;
    s.active[h] = good;
    s.iterations[h] += good;
    // A row that stands still keeps its residual: everything here is finite, and zero times it is zero.
    stride.x[h] = good ? stride.x[h] : 0.0f;
    if (good && !two_parts) course.steps[h] = fmaf(stride.x[h] * length, energy[h], course.steps[h]);
    stride.product[h] = good ? -length : 0.0f;
    stride.mean[h] = -stride.product[h] * sums[h];
    stride.direction[h] = stride.product[h] * ridge[h];
  }
}

// r·r, r·d and r·mean of the new residual, two chains each.
struct ResidualDots {
  float squares[2][2] = {}, with_direction[2][2] = {}, with_mean[2][2] = {};
};

// Keeps additions to x where they stand: the assembler moves none past an exit. Nobody takes it, which the compiler does
// not know. Limits are different at every place: it drops a condition that follows from one before.
__device__ __forceinline__ void keep_apart(int not_negative, int place) {
  if (not_negative < place - 16) exit_thread();
}

// Moves x and r along; `product` becomes the new residual. `old` is the first of the residual there was. The additions
// to x take as long as the work on r, beside which they are to go on: side by side, each waits for the one before it.
template <int kDim>
__device__ __forceinline__ void move(ResidualDots& dots, float (&product)[kDim / 2], const float (&v)[kDim / 2],
                                     const uint32_t (&mean)[kDim / 4], const Stride& stride, float4 old,
                                     float4* residuals, float4* xs, int not_negative) {
  constexpr int kQuads = kDim / 8;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    keep_order();
    if (i % 4 == 0) keep_apart(not_negative, i);
    const float o[4] = {old.x, old.y, old.z, old.w};
    if (i + 1 < kQuads) old = residuals[(i + 1) * kWarpgroupThreads];
    const float2 m0 = unpack(mean[2 * i]), m1 = unpack(mean[2 * i + 1]);
    const float m[4] = {m0.x, m0.y, m1.x, m1.y};
    float* const r = &product[4 * i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int h = j / 2;
      r[j] = fmaf(stride.product[h], r[j], fmaf(stride.mean[h], m[j], fmaf(stride.direction[h], v[4 * i + j], o[j])));
      dots.squares[h][j & 1] = fmaf(r[j], r[j], dots.squares[h][j & 1]);
      dots.with_direction[h][j & 1] = fmaf(r[j], v[4 * i + j], dots.with_direction[h][j & 1]);
      dots.with_mean[h][j & 1] = fmaf(r[j], m[j], dots.with_mean[h][j & 1]);
    }
    residuals[i * kWarpgroupThreads] = make_float4(r[0], r[1], r[2], r[3]);
    add_four(xs + i * kWarpgroupThreads, make_float4(stride.x[0] * v[4 * i], stride.x[0] * v[4 * i + 1],
                                                     stride.x[1] * v[4 * i + 2], stride.x[1] * v[4 * i + 3]));
  }
}

// What the solution has grown to: |x|² in the backward, Σ w E² in the forward.
template <bool kBackward>
__device__ __forceinline__ void grow(Course& course, const Solve& s, const Stride& stride) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float grown = stride.x[h] * fmaf(stride.x[h], s.norm_squared[h], 2 * course.along[h]);  // |x|²
    // x·rhs grows by α r·d: steps are conjugate. After a restart they are not (`along` is NaN), and x grows little.
    const float change = kBackward ? grown : fmaf(stride.x[h], s.rd[h], -s.ridge[h] * grown);
    course.size[h] = kBackward || change == change ? course.size[h] + change : course.size[h];
    course.along[h] = fmaf(stride.x[h], s.norm_squared[h], course.along[h]);
  }
}

// Whether a row goes on from |r|² = now, and what it says if it does not.
template <bool kBackward>
__device__ __forceinline__ void judge(Solve& s, const Course& course, const StepLimits& limits, int h, float now) {
  const float start = s.rr_start[h];
  const bool enough = s.iterations[h] >= limits.least_iterations || now <= 1e-16f * start;
  const float wanted = limits.template wanted<kBackward>(start, s.ridge[h], course.size[h]);
  const bool solved = now <= wanted && enough;
  const bool last = s.iterations[h] >= limits.max_iterations, grown = !(now < kMostGrowth * start);
  const bool promised = now <= limits.tolerance_squared * start;  // what was asked for, if not what was aimed at
  const bool was = s.active[h];
  s.status[h] = !was || solved ? s.status[h]
                : last         ? (promised ? s.status[h] : LLA_ROW_MAX_ITERATIONS)
                : grown        ? LLA_ROW_BREAKDOWN
                               : s.status[h];
  s.active[h] = was && !solved && !last && !grown;
  s.rr[h] = was ? now : s.rr[h];
}

// One step from product = Σ U k and its row sums: A d = (product - sums mean) / data_units + Λ d.
// `direction` holds the direction, and then the next one. Updates x, r and the rows' state, which goes back to memory.
// Says whether a row goes on.
//
// What the next pass needs of the new direction d' = s (r + momentum d) beside its words, |d'|², r·d' and d'·mean,
// would take three dot products at the very end. It follows from r·r, r·d and r·mean instead, which come with the work
// on r. Rounding d' to fp16 is left out of it: 2^-12 of every element, of random sign. In d·mean that would add up, but
// the row sums say how far off it was. (r·d is zero but for rounding. Taken to be zero, |d'|² drifts off where λ is 0.)
// two_parts: U of the pass was multiplied in two.
template <int kDim, bool kBackward>
__device__ __forceinline__ bool step(const StepInputs<kDim>& in, float (&product)[kDim / 2], const Pair<float>& sums,
                                     uint32_t (&direction)[kDim / 4], Direction& d, const Vectors& at, const Lane& lane,
                                     float largest_key_norm, const StepLimits& limits, bool two_parts) {
  SolveMemory::Words state;
  SolveMemory::fetch(state, in.state, lane);
  uint32_t mean[kDim / 4];
  Fragment<kDim>::load_half(mean, in.mean, lane.thread);
  float4* const residuals = reinterpret_cast<float4*>(at.r) + lane.thread;
  float4* const xs = reinterpret_cast<float4*>(at.x) + lane.thread;
  if (at.per_dim) {
    Solve s;
    SolveMemory::unpack(state, s);
    const Pair<float> data_units = {s.omega[0] * d.scale[0], s.omega[1] * d.scale[1]};
    add_ridges<kDim>(product, direction, at.ridges, data_units, lane);
    forget(direction);
  }
  const float4 old = *residuals;
  float v[kDim / 2];
  Pair<float> curvature;
  open_direction<kDim>(v, curvature, direction, product);

  // Everything in units of the data part.
  Solve s;
  SolveMemory::unpack(state, s);
  Pair<float> data_units, ridge, dm;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    data_units[h] = s.omega[h] * d.scale[h];
    ridge[h] = at.per_dim ? 0.0f : fminf(s.ridge[h] * data_units[h], kLargestRidge);
    dm[h] = d.scale[h] > 0
                ? fmaf(sums[h], fast_reciprocal(data_units[h]), d.centre[h] * inverse_power_of_two(d.scale[h]))
                : 0.0f;
  }
  Pair<float> energy;  // d·Md
#pragma unroll
  for (int h = 0; h < 2; ++h) energy[h] = fmaf(-sums[h], dm[h], quad_sum(curvature[h]));
  Course course;
  SolveMemory::fetch_course(course, in.state, lane);
  Stride stride;
  find_stride(stride, s, course, data_units, ridge, sums, energy, two_parts);
  SolveMemory::store_curvature(in.state, s.curvature, lane);
  ResidualDots dots;
  move<kDim>(dots, product, v, mean, stride, old, residuals, xs, limits.max_iterations);
  grow<kBackward>(course, s, stride);

  Pair<float> momentum, scale, with_mean;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float now = quad_sum(dots.squares[h][0] + dots.squares[h][1]),
                rd = quad_sum(dots.with_direction[h][0] + dots.with_direction[h][1]),
                rm = quad_sum(dots.with_mean[h][0] + dots.with_mean[h][1]);
    const float ratio = now * fast_reciprocal(s.rr[h]);
    judge<kBackward>(s, course, limits, h, now);
    momentum[h] = s.active[h] ? ratio * s.inverse[h] : 0.0f;
    // |r + momentum d|² is at most twice |r|² + |momentum d|²: within what fp16 has to spare, and never lost to
    // cancellation.
    const float bound = fmaf(momentum[h] * momentum[h], s.norm_squared[h], now);
    const float square = fmaxf(fmaf(2 * momentum[h], rd, bound), 0x1p-10f * bound);
    scale[h] = scale_of_square(bound);
    s.inverse[h] = inverse_power_of_two(scale[h]);
    scale[h] = s.active[h] ? scale[h] : 0.0f;
    s.rd[h] = scale[h] * fmaf(momentum[h], rd, now);
    course.along[h] *= scale[h] * momentum[h];  // x·r is zero but for rounding
    s.norm_squared[h] = scale[h] * scale[h] * square;
    with_mean[h] = s.active[h] ? scale[h] * fmaf(momentum[h], dm[h], rm) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int h = i & 1;
    direction[i] = pack(fmaf(momentum[h], v[2 * i], product[2 * i]) * scale[h],
                        fmaf(momentum[h], v[2 * i + 1], product[2 * i + 1]) * scale[h]);
  }
  finish_direction(d, s.norm_squared, with_mean, largest_key_norm, s.loose);
  SolveMemory::store_changed(in.state, s, lane);
  SolveMemory::store_course(in.state, course, lane);
  return s.active[0] || s.active[1];
}

}  // namespace lla::cuda::tensor
