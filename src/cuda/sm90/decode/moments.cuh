// The first of two passes for rows that share keys: of each row Σ w (k - c)(k - c)ᵀ and Σ w (k - c), for as many rows at
// once as there are registers for. The second pass has x and the values (given_x.cuh).
//
// Keys lie in shared memory as they came and are the right operand of the products for all rows. The left one,
// w (k - c), is made in registers by those who multiply it, in two parts of bf16, so that the sums are those of the
// exact keys to 2^-17: the second pass may take exact keys. Four warps fetch the keys and make the weights, from logits
// on the tensor cores. c is the row's weighted mean of the first keys that all rows see. w is relative to an integer maximum of each
// row that follows only where a weight would become large: bf16 has fp32's range.
#pragma once

#include "cuda/sm90/decode/moments_weigh.cuh"
#include "cuda/sm90/decode/multiply.cuh"

namespace lla::cuda::sm90::decode {

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

// 64 rows of one row's sums, kBlock of them, in a warpgroup.
template <class C, int kRow, int kBlock, int kColumns>
struct MomentsTask {
  using Atom = typename LeftFromRegisters<kColumns>::Atom;
  static constexpr int kCount = kColumns / 2;
  float sums[kCount];
  float of_keys[2];  // Σ w (k - c) of columns g and g + 8 of this warp's sixteen, over this thread's keys
  float centre[2];
  uint32_t left[3][4];
  int sums_max, partial_max;

  __device__ __forceinline__ static int column() {
    return 64 * kBlock + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& x : sums) x *= factor;
    of_keys[0] *= factor, of_keys[1] *= factor;
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
  __device__ __forceinline__ Loaded load(uint32_t stage, const float* weights, int step) const {
    const int lane = threadIdx.x % 32, key = step * kWarpKeys + lane % 16;
    const int chunk = threadIdx.x / 32 % 4 * 2 + lane / 16;
    Loaded to;
    load_transposed(to.raw, stage + kBlock * C::kBoxBytes + key * 128 + (chunk ^ (key & 7)) * 16);
    const float* const from = weights + step * kWarpKeys + lane % 4 * 2;
    to.near = *reinterpret_cast<const float2*>(from), to.far = *reinterpret_cast<const float2*>(from + 8);
    return to;
  }
  // The left operand: w (k - c).
  template <int kParts>
  __device__ __forceinline__ void convert(const Loaded& from, float factor) {
    // Raw words: keys 2t of column g, keys 2t + 8, and both again of column g + 8; the operand wants columns first.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 k = widen_pair<true>(from.raw[i]), w = i % 2 == 0 ? from.near : from.far;
      const float a = (k.x - centre[i / 2]) * (w.x * factor), b = (k.y - centre[i / 2]) * (w.y * factor);
      const int at = i % 2 * 2 + i / 2;
      left[0][at] = narrow_pair<true>(a, b);
      const float2 rounded = widen_pair<true>(left[0][at]);
      left[1][at] = narrow_pair<true>(a - rounded.x, b - rounded.y);
      if constexpr (kParts == 3) {
        const float2 lesser = widen_pair<true>(left[1][at]);
        left[2][at] = narrow_pair<true>(a - rounded.x - lesser.x, b - rounded.y - lesser.y);
      }
      of_keys[i / 2] += a + b;
    }
  }
  template <int kParts>
  __device__ __forceinline__ void multiply(const detail::Operand& stage, int step, bool add) {
    constexpr int kFrom = kColumns == 64 ? kBlock * C::kBoxBytes / 16 : 0;
    const uint64_t keys = stage.at(step * 128 + kFrom);
    mma_fence();
    detail::issue_rs<Atom>(sums, left[0], keys, std::make_index_sequence<kCount>{},
                           add ? detail::ScaleOut::One : detail::ScaleOut::Zero);
    detail::issue_rs<Atom>(sums, left[1], keys, std::make_index_sequence<kCount>{});
    if constexpr (kParts == 3) detail::issue_rs<Atom>(sums, left[2], keys, std::make_index_sequence<kCount>{});
    mma_commit();
  }
  // Into the row's partial, with (k - c) on both sides; and the sums start anew.
  __device__ __forceinline__ void add_to(float* partial, const float* all_centre, bool fresh) {
    constexpr ProductTile kTile = key_tile(C::kDim, kBlock, false);
    const float low = keys_sum(of_keys[0]), high = keys_sum(of_keys[1]);
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
    of_keys[0] = of_keys[1] = 0;
  }
  __device__ __forceinline__ void finish(float* partial) const {
    if (threadIdx.x % 128 != 0) return;
    reinterpret_cast<PartialHead*>(partial)->matrix_max[key_tile(C::kDim, kBlock, false).warpgroup] = partial_max;
  }
};

// What a warpgroup multiplies: at head dimension 128 the first 64 rows of one row's sums and the others of the other's,
// which symmetry makes half as wide; at 64 all of two rows'.
template <class C, int kWarpgroup>
struct Tasks {
  static constexpr bool kWide = C::kDim == 128;
  static constexpr int kFirst = kWide ? kWarpgroup : 2 * kWarpgroup, kSecond = kWide ? 1 - kWarpgroup : kFirst + 1;
  MomentsTask<C, kFirst, 0, C::kDim> first;
  MomentsTask<C, kSecond, kWide ? 1 : 0, 64> second;
};

template <class C, int kWarpgroup>
__device__ __forceinline__ void form_moments(MomentsShared<C>& s, const Params& p) {
  using Both = Tasks<C, kWarpgroup>;
  Both tasks;
  define(tasks.first.sums);
  define(tasks.second.sums);
  uint32_t slot = 0, parity = 0, units = 0;
  int tiles = 0;
  bool fresh = true;
  const auto tile = [&]<int kParts>(std::integral_constant<int, kParts>, const unsigned char* stage, int at) {
    const auto& head = s.head[at];
    const uint32_t from = shared_address(stage);
    const detail::Operand operand(stage, C::kBoxBytes);
    const float first_factor = tasks.first.follow(head.max[Both::kFirst], tiles == 0);
    const float second_factor = tasks.second.follow(head.max[Both::kSecond], tiles == 0);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const auto one = [&](auto& task, int row, float factor) {
        const auto loaded = task.load(from, s.weights[at][row], step);
        mma_wait<1>();  // the task's last products have read their left operand
#pragma unroll
        for (int part = 0; part < kParts; ++part) pin(task.left[part]);
        task.template convert<kParts>(loaded, factor);
        task.template multiply<kParts>(operand, step, step > 0 || tiles > 0);
      };
      one(tasks.first, Both::kFirst, first_factor);
      one(tasks.second, Both::kSecond, second_factor);
    }
    mma_wait<0>();
    pin(tasks.first.sums);
    pin(tasks.second.sums);
    ++tiles;
  };
  using Two = std::integral_constant<int, 2>;
  using Three = std::integral_constant<int, 3>;
  const auto partial_of = [&](int index, int row) {
    return p.partials + int64_t{index + row} * partial_floats(C::kDim, false);
  };
  const auto add_to = [&](int index) {
    tasks.first.add_to(partial_of(index, Both::kFirst), s.centre[Both::kFirst], fresh);
    tasks.second.add_to(partial_of(index, Both::kSecond), s.centre[Both::kSecond], fresh);
    fresh = false;
    tiles = 0;
  };
  for (;;) {
    s.full[slot].wait(parity);
    const int flags = s.head[slot].flags, partial = s.head[slot].partial;
    if (flags & kStop) break;
    if (flags & kFresh) {
      fresh = true, tiles = 0;
      const auto begin = [&](auto& task, int row) {
        task.centre[0] = s.centre[row][task.column()], task.centre[1] = s.centre[row][task.column() + 8];
        task.of_keys[0] = task.of_keys[1] = 0;
      };
      begin(tasks.first, Both::kFirst);
      begin(tasks.second, Both::kSecond);
    }
    if (flags & kPrecise) {
      tile(Three{}, s.stage[slot], slot);
    } else {
      tile(Two{}, s.stage[slot], slot);
    }
    s.empty[slot].arrive_for_warp();
    if (tiles == kRestart) add_to(partial);
    if (flags & kEnd) {
      s.full[C::kStages].wait(units++ & 1);
      tile(Three{}, s.extra, C::kStages);
      add_to(partial);
      tasks.first.finish(partial_of(partial, Both::kFirst));
      tasks.second.finish(partial_of(partial, Both::kSecond));
      __syncwarp();
      s.finished.arrive_for_warp();
    }
    slot = slot + 1 == C::kStages ? 0 : slot + 1;
    parity ^= slot == 0;
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
  if (threadIdx.x < 128) {
    take_registers<192>();
    form_moments<C, 0>(s, p);
  } else if (threadIdx.x < 256) {
    take_registers<192>();
    form_moments<C, 1>(s, p);
  } else {
    give_registers<120>();
    Weigher<C>(s, p).run();
  }
}

}  // namespace lla::cuda::sm90::decode
