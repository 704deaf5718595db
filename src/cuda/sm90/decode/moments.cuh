// The first of two passes for rows that share keys: of each row Σ w (k - c)(k - c)ᵀ and Σ w (k - c), for as many rows at
// once as there are registers for. The second pass has x and the values (bundle.cuh).
//
// Keys lie in shared memory as they came and are the right operand of the products for all rows. The left one,
// w (k - c), is made in registers by those who multiply it, in parts of bf16, so that the sums are those of the exact
// keys to 2^-17 or better: the second pass may take exact keys. Four warps fetch the keys and make the weights, from
// logits on the tensor cores (moments_weigh.cuh). c is the row's weighted mean of the first keys that all rows see, or 0.
// w is relative to an integer maximum of each row that follows only where a weight would become large: bf16 has fp32's
// range.
#pragma once

#include "cuda/sm90/decode/moments_weigh.cuh"
#include "cuda/sm90/mma.cuh"

namespace lla::cuda::sm90::decode {

__device__ __forceinline__ void add_to_global(float4* at, float4 v) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Adds the accumulators to the partial's matrix, which is relative to the maximum `partial_max`.
template <int kCount>
__device__ __forceinline__ void flush(float4* to, float (&acc)[kCount], bool first, int acc_max, int& partial_max) {
  const int thread = threadIdx.x % 128;
  if (first) partial_max = acc_max;
  if (!first && acc_max > partial_max + 40) {  // too far to scale what is new
    const float factor = four_to(partial_max - acc_max);
    for (int i = 0; i < kCount / 4; ++i) {
      float4& at = to[i * 128 + thread];
      const float4 v = at;
      at = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    }
    partial_max = acc_max;
  }
  const float factor = four_to(acc_max - partial_max);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 v{acc[4 * i] * factor, acc[4 * i + 1] * factor, acc[4 * i + 2] * factor, acc[4 * i + 3] * factor};
    if (first) {
      to[i * 128 + thread] = v;
    } else {
      add_to_global(&to[i * 128 + thread], v);
    }
  }
}

template <int kColumns>
struct LeftFromRegisters;
template <>
struct LeftFromRegisters<64> {
  using Atom = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;
};
template <>
struct LeftFromRegisters<128> {
  using Atom = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>;
};

// Two numbers of bf16 in a word.
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t times_plus(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t times_minus(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("{.reg .b32 n; neg.bf16x2 n, %3; fma.rn.bf16x2 %0, %1, %2, n;}" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 64 rows of one row's sums, kBlock of them, in a warpgroup.
template <class C, int kBlock, int kColumns>
struct MomentsTask {
  using Atom = typename LeftFromRegisters<kColumns>::Atom;
  static constexpr int kCount = kColumns / 2;
  float sums[kCount];
  float of_keys[2];   // Σ w (k - c) of columns g and g + 8 of this warp's sixteen, over this thread's keys
  float of_plain[4];  // the same where the row is plain: columns g and g + 8, each twice, over the tile's keys
  float centre[2];
  bool plain, precise;
  uint32_t left[2][4];
  int row, sums_max, partial_max;  // row: of the bundle

  __device__ __forceinline__ static int column() {
    return 64 * kBlock + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& x : sums) x *= factor;
    of_keys[0] *= factor, of_keys[1] *= factor;
#pragma unroll
    for (float& x : of_plain) x *= factor;
  }
  // The sums follow a maximum far above theirs. Nothing is in flight.
  __device__ __forceinline__ float follow(int max, bool fresh) {
    if (fresh) sums_max = max;
    if (max > sums_max + kNegligible) {
      mma_wait<0>();
      pin(sums);
      scale(four_to(sums_max - max));
      sums_max = max;
    }
    return four_to(max - sums_max);
  }
  // Sixteen keys, of this warp's sixteen columns, and their weights.
  struct Loaded {
    uint32_t raw[4];
    float2 near, far;
  };
  // Nothing is in flight: what the left operand was is of no use, and need not be kept in registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (uint32_t& word : left[part]) asm volatile("" : "=r"(word));
    }
  }
  // Where this lane reads its part of the first sixteen; those after are kStep and kWarpKeys on.
  struct Place {
    uint32_t raw;
    const float* weights;
    __device__ __forceinline__ void next() { raw += kWarpKeys * 128, weights += kWarpKeys; }
  };
  __device__ __forceinline__ Place place(uint32_t stage, const float* weights) const {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 16;
    return {stage + kBlock * C::kBoxBytes + lane % 16 * 128 + (chunk ^ (lane & 7)) * 16, weights + lane % 4 * 2};
  }
  __device__ __forceinline__ static Loaded load(const Place& from) {
    Loaded to;
    load_transposed(to.raw, from.raw);
    to.near = *reinterpret_cast<const float2*>(from.weights);
    to.far = *reinterpret_cast<const float2*>(from.weights + 8);
    return to;
  }
  // The left operand: w (k - c) in two parts; or what these lack, another round for those whom two do not suffice.
  template <bool kRest>
  __device__ __forceinline__ void convert(const Loaded& from, float factor) {
    // Raw words: keys 2t of column g, keys 2t + 8, and both again of column g + 8; the operand wants columns first.
    float2 near = from.near, far = from.far;
    if (factor != 1) near.x *= factor, near.y *= factor, far.x *= factor, far.y *= factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 k = widen_pair<true>(from.raw[i]), w = i % 2 == 0 ? near : far;
      const float a = (k.x - centre[i / 2]) * w.x, b = (k.y - centre[i / 2]) * w.y;
      const int at = i % 2 * 2 + i / 2;
      const uint32_t high = narrow_pair<true>(a, b);
      const float2 rounded = widen_pair<true>(high);
      const uint32_t low = narrow_pair<true>(a - rounded.x, b - rounded.y);
      if constexpr (kRest) {
        const float2 lesser = widen_pair<true>(low);
        left[0][at] = narrow_pair<true>(a - rounded.x - lesser.x, b - rounded.y - lesser.y), left[1][at] = 0;
      } else {
        left[0][at] = high, left[1][at] = low;
        of_keys[i / 2] += a + b;
      }
    }
  }
  // The left operand of a plain row: w k, from weights in two parts. Products of 16-bit numbers leave a remainder that is
  // one, too.
  __device__ __forceinline__ void convert_plain(const Loaded& from, float factor) {
    uint2 near = make_uint2(__float_as_uint(from.near.x), __float_as_uint(from.near.y));
    uint2 far = make_uint2(__float_as_uint(from.far.x), __float_as_uint(from.far.y));
    if (factor != 1) {
      const uint32_t both = narrow_pair<true>(factor, factor);
      near = make_uint2(times(near.x, both), times(near.y, both)),
      far = make_uint2(times(far.x, both), times(far.y, both));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 w = i % 2 == 0 ? near : far;
      const int at = i % 2 * 2 + i / 2;
      left[0][at] = times(w.x, from.raw[i]);
      left[1][at] = times_plus(w.y, from.raw[i], times_minus(w.x, from.raw[i], left[0][at]));
    }
    constexpr uint32_t kOnes = 0x3f803f80;
    warp_product<true>(of_plain, left[0], kOnes, kOnes);
    warp_product<true>(of_plain, left[1], kOnes, kOnes);
  }
  __device__ __forceinline__ void multiply(const detail::Operand& stage, int step, bool add) {
    constexpr int kFrom = kColumns == 64 ? kBlock * C::kBoxBytes / 16 : 0;
    const uint64_t keys = stage.at(step * 128 + kFrom);
    mma_fence();
    detail::issue_rs<Atom>(sums, left[0], keys, std::make_index_sequence<kCount>{},
                           add ? detail::ScaleOut::One : detail::ScaleOut::Zero);
    detail::issue_rs<Atom>(sums, left[1], keys, std::make_index_sequence<kCount>{});
    mma_commit();
  }
  // Into the row's partial, with (k - c) on both sides; and the sums start anew.
  __device__ __forceinline__ void add_to(float* partial, const float* all_centre, bool fresh) {
    constexpr ProductTile kTile = key_tile(C::kDim, kBlock, false);
    const float low = plain ? of_plain[0] : keys_sum(of_keys[0]), high = plain ? of_plain[2] : keys_sum(of_keys[1]);
    float out[kCount + 4];
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float2 c = *reinterpret_cast<const float2*>(&all_centre[kTile.first_column + 8 * i + threadIdx.x % 4 * 2]);
      out[4 * i] = fmaf(-low, c.x, sums[4 * i]), out[4 * i + 1] = fmaf(-low, c.y, sums[4 * i + 1]);
      out[4 * i + 2] = fmaf(-high, c.x, sums[4 * i + 2]), out[4 * i + 3] = fmaf(-high, c.y, sums[4 * i + 3]);
    }
    const bool first = threadIdx.x % 4 == 0;
    out[kCount] = first ? low : 0, out[kCount + 1] = 0, out[kCount + 2] = first ? high : 0, out[kCount + 3] = 0;
    flush(reinterpret_cast<float4*>(partial + partial_matrix(C::kDim) + kTile.from), out, fresh, sums_max, partial_max);
    clear();
  }
  __device__ __forceinline__ void clear() {
    of_keys[0] = of_keys[1] = 0;
#pragma unroll
    for (float& x : of_plain) x = 0;
  }
  __device__ __forceinline__ void finish(float* partial) const {
    if (threadIdx.x % 128 != 0) return;
    reinterpret_cast<PartialHead*>(partial)->matrix_max[key_tile(C::kDim, kBlock, false).warpgroup] = partial_max;
  }
};

// What a warpgroup multiplies: at head dimension 128 the first 64 rows of one row's sums and the others of the other's,
// which symmetry makes half as wide; at 64 all of two rows'. Both warpgroups run the same instructions, in loops that are
// not unrolled: code that is fetched for one warp at a time is what such a kernel waits for.
template <class C>
__device__ __forceinline__ void form_moments(MomentsShared<C>& s, const Params& p) {
  constexpr bool kWide = C::kDim == 128;
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  MomentsTask<C, 0, C::kDim> first;
  MomentsTask<C, kWide ? 1 : 0, 64> second;
  first.row = kWide ? group : 2 * group, second.row = kWide ? 1 - group : 2 * group + 1;
  define(first.sums);
  define(second.sums);
  uint32_t slot = 0, parity = 0, units = 0;
  int tiles = 0;       // in the sums
  bool fresh = true;   // nothing is in the partial
  bool extra = false;  // the tile of keys that had been the heaviest: a unit's last
  int flags = 0, partial = 0;
  const auto partial_of = [&](int row) { return p.partials + int64_t{partial + row} * partial_floats(C::kDim, false); };
  for (;;) {
    const int at = extra ? C::kStages : static_cast<int>(slot);
    s.full[at].wait(extra ? units++ & 1 : parity);
    if (!extra) flags = s.head[at].flags, partial = s.head[at].partial;
    if (flags & kStop) break;
    if (!extra && (flags & kFresh)) {
      fresh = true, tiles = 0;
      const auto begin = [&](auto& task) {
        task.centre[0] = s.centre[task.row][task.column()], task.centre[1] = s.centre[task.row][task.column() + 8];
        task.plain = s.plain[task.row], task.precise = s.precise[task.row];
        task.clear();
      };
      begin(first);
      begin(second);
    }
    const unsigned char* const stage = extra ? s.extra : s.stage[at];
    const detail::Operand operand(stage, C::kBoxBytes);
    const float first_factor = first.follow(s.head[at].max[first.row], tiles == 0);
    const float second_factor = second.follow(s.head[at].max[second.row], tiles == 0);
    const int rounds = first.precise || second.precise ? 2 : 1;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      first.forget(), second.forget();
      auto first_place = first.place(shared_address(stage), s.weights[at][first.row]);
      auto second_place = second.place(shared_address(stage), s.weights[at][second.row]);
      auto first_loaded = first.load(first_place);
      auto second_loaded = second.load(second_place);
      const auto multiply = [&](auto& task, const auto& loaded, int step, float factor) {
        mma_wait<1>();  // the task's last products have read their left operand
        pin(task.left[0]);
        pin(task.left[1]);
        if (round > 0) {
          task.template convert<true>(loaded, task.precise ? factor : 0.0f);  // nothing of the other's
        } else if (task.plain) {
          task.convert_plain(loaded, factor);
        } else {
          task.template convert<false>(loaded, factor);
        }
        task.multiply(operand, step, step > 0 || tiles > 0 || round > 0);
      };
#pragma unroll 1
      for (int step = 0; step < 4; ++step) {
        multiply(first, first_loaded, step, first_factor);
        first_place.next();  // behind the last sixteen lies memory that is there, and is not looked at
        first_loaded = first.load(first_place);
        multiply(second, second_loaded, step, second_factor);
        second_place.next();
        second_loaded = second.load(second_place);
      }
      mma_wait<0>();
      pin(first.sums);
      pin(second.sums);
    }
    ++tiles;
    if (!extra) s.empty[slot].arrive_for_warp();
    if (extra || tiles == kRestart) {
      first.add_to(partial_of(first.row), s.centre[first.row], fresh);
      second.add_to(partial_of(second.row), s.centre[second.row], fresh);
      fresh = false, tiles = 0;
    }
    if (extra) {
      first.finish(partial_of(first.row));
      second.finish(partial_of(second.row));
      __syncwarp();
      s.finished.arrive_for_warp();
    } else {
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
      parity ^= slot == 0;
    }
    extra = !extra && (flags & kEnd);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) moments_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  MomentsShared<C>& s = *reinterpret_cast<MomentsShared<C>*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) s.full[i].init(kWarpArrivals), s.empty[i].init(8 * kWarpArrivals);
    s.full[C::kStages].init(kWeighers * kWarpArrivals);
    s.finished.init(8 * kWarpArrivals);
    for (int i = 0; i < C::kRawSlots; ++i) s.loaded[0][i].init(1);
    for (int i = 0; i < kWeighers; ++i) s.first_loaded[i].init(1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_last_kernel();
  let_next_kernel_begin();
  // 384 threads begin with 168 registers each: 256 * 192 + 128 * 120 are as many.
  if (threadIdx.x < 256) {
    take_registers<192>();
    form_moments<C>(s, p);
  } else {
    give_registers<120>();
    Weigher<C>(s, p).run();
  }
}

}  // namespace lla::cuda::sm90::decode
