// Decode with x given, a row at a time: o = Σ p (1 + (k - mean).x) v in one pass, two sums of values and no matrix.
// Everything in fp32; bound by memory.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/given_x_config.cuh"
#include "cuda/sm90/decode/given_x_merge.cuh"
#include "cuda/sm90/decode/load.cuh"

namespace lla::cuda::sm90::decode {

template <class C>
struct GivenXShared {
  static constexpr int kDim = C::kDim;
  alignas(1024) unsigned char raw[C::kWarps][C::kRawSlots][2][C::kRawBytes];
  float2 query_x[C::kDim];
  float sums[C::kWarps][2 * C::kDim];
  GivenXHead heads[C::kWarps];
  Barrier loaded[C::kWarps][C::kRawSlots];

  __device__ __forceinline__ RawTile tile(int warp, int slot) { return {raw[warp][slot][0], raw[warp][slot][1]}; }
};

template <class C>
struct GivenXWarp {
  GivenXShared<C>& s;
  const Params& p;
  const Unit& u;
  Ring<C, GivenXShared<C>>& ring;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float plain[C::kChunks], with_e[C::kChunks];
  float max = -INFINITY, omega = 0, omega_e = 0, centre = 0;
  bool invalid = false;

  __device__ __forceinline__ GivenXWarp(GivenXShared<C>& shared, const Params& params, const Unit& unit,
                                        Ring<C, GivenXShared<C>>& own)
      : s(shared), p(params), u(unit), ring(own) {
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) plain[i] = with_e[i] = 0;
  }
  __device__ __forceinline__ int first_of(int n) const { return u.start + (n * C::kWarps + warp) * kWarpKeys; }
  __device__ __forceinline__ void ask(int n) {
    if (first_of(n) < u.keys.end) ring.ask(p, u, first_of(n), u.keys, invalid);
  }
  __device__ __forceinline__ int key_at(int j) const { return (j / 2) * 8 + (lane % 4) * 2 + j % 2; }

  __device__ __forceinline__ void tile(const RawTile& raw, uint32_t seen) {
    float logit[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
    const uint32_t keys = raw_start(raw.keys);
#pragma unroll
    for (int i = 0; i < C::kChunks / 2; ++i) {
      uint32_t k[4];
      load_transposed(k, raw_at(keys, i));
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float2 qx = s.query_x[8 * (2 * i + c) + lane / 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 wide = widen_pair<C::kBf16>(k[2 * c + h]);
          logit[2 * h] = fmaf(qx.x, wide.x, logit[2 * h]), logit[2 * h + 1] = fmaf(qx.x, wide.y, logit[2 * h + 1]);
          e[2 * h] = fmaf(qx.y, wide.x, e[2 * h]), e[2 * h + 1] = fmaf(qx.y, wide.y, e[2 * h + 1]);
        }
      }
    }
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      logit[j] = column_sum(logit[j]);
      e[j] = column_sum(e[j]);
      if (!(seen >> key_at(j) & 1)) logit[j] = -INFINITY, e[j] = 0;
      largest = fmaxf(largest, logit[j]);
    }
    largest = keys_max(largest);
    if (largest > max) {
      // E is taken relative to the heaviest key's: where that has nearly all the weight, nothing cancels.
      float heaviest = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) heaviest = logit[j] == largest ? e[j] : heaviest;
      heaviest = keys_max(heaviest);
      const float factor = max == -INFINITY ? 0 : exp2_fast(max - largest),
                  by = max == -INFINITY ? 0 : centre - heaviest;
#pragma unroll
      for (int i = 0; i < C::kChunks; ++i) with_e[i] = fmaf(by, plain[i], with_e[i]) * factor, plain[i] *= factor;
      omega_e = fmaf(by, omega, omega_e) * factor, omega *= factor;
      max = largest, centre = heaviest;
    }
    float w[4], we[4];
    const float base = max == -INFINITY ? 0 : max;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = exp2_fast(logit[j] - base);
      we[j] = w[j] * (e[j] - centre);
      omega += w[j], omega_e += we[j];
    }
    const uint32_t values = raw_start(raw.values);
#pragma unroll
    for (int i = 0; i < C::kChunks / 2; ++i) {
      uint32_t v[4];
      load_transposed(v, raw_at(values, i));
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float a = plain[2 * i + c], b = with_e[2 * i + c];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 wide = widen_pair<C::kBf16>(v[2 * c + h]);
          a = fmaf(w[2 * h], wide.x, fmaf(w[2 * h + 1], wide.y, a));
          b = fmaf(we[2 * h], wide.x, fmaf(we[2 * h + 1], wide.y, b));
        }
        plain[2 * i + c] = a, with_e[2 * i + c] = b;
      }
    }
  }

  __device__ __forceinline__ void stream() {
    if (u.first) invalid |= others_miss_a_page(p.cache, u, threadIdx.x, C::kThreads);
#pragma unroll 1
    for (int n = 0; n < C::kRawSlots; ++n) ask(n);
#pragma unroll 1
    for (int n = 0; first_of(n) < u.keys.end; ++n) {
      const uint32_t seen = seen_of(u.keys, first_of(n));
      tile(ring.take(seen), seen);
      __syncwarp();
      ask(n + C::kRawSlots);
    }
  }

  // All warps' sums into the part's partial.
  __device__ void publish(float* partial) {
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) {
      const float a = keys_sum(plain[i]), b = keys_sum(with_e[i]);
      if (lane % 4 == 0) s.sums[warp][8 * i + lane / 4] = a, s.sums[warp][C::kDim + 8 * i + lane / 4] = b;
    }
    omega = keys_sum(omega), omega_e = keys_sum(omega_e);
    if (lane == 0) s.heads[warp] = {max, omega, omega_e, centre, 0};
    const bool wrong = __syncthreads_or(invalid) || u.invalid;
    float top = -INFINITY, all = 0, all_e = 0, reference = 0;
    for (int w = 0; w < C::kWarps; ++w) {
      if (s.heads[w].max > top) top = s.heads[w].max, reference = s.heads[w].centre;
    }
    for (int d = threadIdx.x; d < 2 * C::kDim; d += C::kThreads) {
      float sum = 0;
      for (int w = 0; w < C::kWarps; ++w) {
        if (s.heads[w].omega == 0) continue;  // no key
        float x = s.sums[w][d];
        if (d >= C::kDim) x = fmaf(s.heads[w].centre - reference, s.sums[w][d - C::kDim], x);
        sum = fmaf(exp2_fast(s.heads[w].max - top), x, sum);
      }
      partial[kGivenXHead + d] = sum;
    }
    if (threadIdx.x == 0) {
      for (int w = 0; w < C::kWarps; ++w) {
        if (s.heads[w].omega == 0) continue;  // no key
        const float factor = exp2_fast(s.heads[w].max - top);
        all = fmaf(factor, s.heads[w].omega, all);
        all_e = fmaf(factor, fmaf(s.heads[w].centre - reference, s.heads[w].omega, s.heads[w].omega_e), all_e);
      }
      *reinterpret_cast<GivenXHead*>(partial) = {top, all, all_e, reference, wrong, 0};
    }
    __syncthreads();
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) given_x_kernel(const __grid_constant__ Params p) {
  auto& s = *reinterpret_cast<GivenXShared<C>*>(dynamic_tiles);
  if (threadIdx.x == 0) {
    for (auto& ring : s.loaded) {
      for (Barrier& slot : ring) slot.init(kFillArrivals<C>);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_last_kernel();
  let_next_kernel_begin();
  Ring<C, GivenXShared<C>> ring{s, static_cast<int>(threadIdx.x / 32)};
  Walk walk = find_start(p, blockIdx.x);
  while (walk.left > 0) {
    const Unit u = take(p, walk);
    const int thread = threadIdx.x;
    if (thread == 0) record_row(p, u);
    if (thread < C::kDim) {
      float2 qx{0, 0};
      if (thread < p.dim) {
        const int64_t at_q = row_offset(p.q, u.batch, u.position, u.head) + thread * p.q.stride[3];
        const int64_t at_x = row_offset(p.x, u.batch, u.position, u.head) + thread * p.x.stride[3];
        qx = {load_as<float>(p.q.data, p.q.dtype, at_q) * p.half_scale * 2, load_as<float>(p.x.data, p.x.dtype, at_x)};
      }
      s.query_x[thread] = qx;
    }
    __syncthreads();
    GivenXWarp<C> warp(s, p, u, ring);
    warp.stream();
    warp.publish(p.partials + int64_t{u.partial} * given_x_row_floats(C::kDim));
  }
}

}  // namespace lla::cuda::sm90::decode
