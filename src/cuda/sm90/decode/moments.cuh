// The first of two passes for rows that share keys: of each row Σ w (k - c)(k - c)ᵀ and Σ w (k - c), for as many rows at
// once as there are registers for. The second pass has x and the values (bundle.cuh).
//
// Keys lie in shared memory as they came and are the right operand of the products for all rows. The left one,
// w (k - c), is made in registers by those who multiply it, in parts of bf16, so that the sums are those of the exact
// keys to 2^-17 or better: the second pass may take exact keys. Four warpgroups share the tensor cores: some multiply
// while others make their operand. The sums of the left operand are eight more columns of these products: a small product
// of a warp would wait for the end of another warpgroup's large one. Four warps fetch the keys and make the weights,
// from logits on the tensor cores (moments_weigh.cuh). c is the row's weighted mean of the first keys that all rows see,
// or 0. w is relative to an integer maximum of each row that follows only where a weight would become large: bf16 has
// fp32's range.
#pragma once

#include "cuda/sm90/decode/moments_weigh.cuh"
#include "cuda/sm90/mma.cuh"

namespace lla::cuda::sm90::decode {

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
      add_four(&to[i * 128 + thread], v);
    }
  }
}

// Products with the left operand, or its negative, in registers: of 64 columns of keys; and with eight of ones beside
// them.
using cute::SM90::GMMA::ScaleIn;
template <ScaleIn kSign>
using Of64 = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<detail::Major::K, detail::Major::MN, kSign>;
template <ScaleIn kSign>
using Of64AndSums = cute::SM90::GMMA::MMA_64x72x16_F32BF16BF16_RS<detail::Major::K, detail::Major::MN, kSign>;

// How the left operand is made: w k; w (k - c); what the two parts of this lack.
enum class Way { plain, shifted, rest };

// The kBlock-th 64 rows of a row's sums.
template <class C, int kBlock, int kColumns>
struct MomentsTask {
  static constexpr int kCount = kColumns / 2 + 4;
  static constexpr bool kWide = kColumns == 128;
  float sums[32];       // of the first 64 columns, where there are more
  float last_sums[36];  // of the last 64, and Σ w (k - c) four times over
  float centre[2];
  bool plain, precise;
  int sums_max, partial_max;

  __device__ __forceinline__ static int column() {
    return 64 * kBlock + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ void begin(const float* all_centre, bool is_plain, bool is_precise) {
    centre[0] = all_centre[column()], centre[1] = all_centre[column() + 8];
    plain = is_plain, precise = is_precise;
  }
  // Nothing is in flight.
  __device__ __forceinline__ void settle() {
    mma_wait<0>();
    if constexpr (kWide) pin(sums);
    pin(last_sums);
  }
  // The sums follow a maximum far above theirs.
  __device__ __forceinline__ float follow(int max, bool fresh) {
    if (fresh) sums_max = max;
    if (max > sums_max + kNegligible) {
      const float factor = four_to(sums_max - max);
      if constexpr (kWide) {
#pragma unroll
        for (float& x : sums) x *= factor;
      }
#pragma unroll
      for (float& x : last_sums) x *= factor;
      sums_max = max;
    }
    return four_to(max - sums_max);
  }
  // Where this lane reads its part of the first sixteen keys and their weights.
  struct Place {
    uint32_t raw;
    const float* weights;
  };
  __device__ __forceinline__ Place place(uint32_t stage, const float* weights) const {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 16;
    return {stage + kBlock * C::kBoxBytes + lane % 16 * 128 + (chunk ^ (lane & 7)) * 16, weights + lane % 4 * 2};
  }
  // Sixteen keys, of this warp's sixteen columns, and their weights.
  struct Loaded {
    uint32_t raw[4];
    float2 near, far;
  };
  __device__ __forceinline__ static Loaded load(const Place& from, int step) {
    Loaded to;
    load_transposed(to.raw, from.raw + step * kWarpKeys * 128);
    to.near = *reinterpret_cast<const float2*>(from.weights + step * kWarpKeys);
    to.far = *reinterpret_cast<const float2*>(from.weights + step * kWarpKeys + 8);
    return to;
  }
  // Raw words: keys 2t of column g, keys 2t + 8, and both again of column g + 8; the operand wants columns first.
  __device__ __forceinline__ static int place_of(int word) { return word % 2 * 2 + word / 2; }
  // w (k - c) in two parts; or what these lack, in one.
  template <bool kRest>
  __device__ __forceinline__ void convert(uint32_t (&to)[2][4], const Loaded& from, float factor) const {
    const float2 near{from.near.x * factor, from.near.y * factor}, far{from.far.x * factor, from.far.y * factor};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 k = widen_pair<true>(from.raw[i]), w = i % 2 == 0 ? near : far;
      const float a = (k.x - centre[i / 2]) * w.x, b = (k.y - centre[i / 2]) * w.y;
      const uint32_t high = narrow_pair<true>(a, b);
      const float2 rounded = widen_pair<true>(high);
      const uint32_t low = narrow_pair<true>(a - rounded.x, b - rounded.y);
      to[0][place_of(i)] = high, to[1][place_of(i)] = low;
      if constexpr (kRest) {
        const float2 lesser = widen_pair<true>(low);
        to[0][place_of(i)] = narrow_pair<true>(a - rounded.x - lesser.x, b - rounded.y - lesser.y);
      }
    }
  }
  // Of a plain row w k, from weights in two parts, the first part's negative. Products of 16-bit numbers leave a
  // remainder that is one, too.
  __device__ __forceinline__ static void convert_plain(uint32_t (&to)[2][4], const Loaded& from, float factor) {
    const uint32_t plus = narrow_pair<true>(factor, factor), minus = narrow_pair<true>(-factor, -factor);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 w = i % 2 == 0 ? from.near : from.far;
      const uint32_t high = times(__float_as_uint(w.x), plus), low = times(__float_as_uint(w.y), plus);
      const uint32_t negative = times(times(__float_as_uint(w.x), minus), from.raw[i]);
      to[0][place_of(i)] = negative;
      to[1][place_of(i)] = times_plus(low, from.raw[i], times_plus(high, from.raw[i], negative));
    }
  }
  template <ScaleIn kSign>
  __device__ __forceinline__ void multiply(const uint32_t* part, uint64_t first, uint64_t last, bool add) {
    const detail::ScaleOut scale = add ? detail::ScaleOut::One : detail::ScaleOut::Zero;
    if constexpr (kWide) detail::issue_rs<Of64<kSign>>(sums, part, first, std::make_index_sequence<32>{}, scale);
    detail::issue_rs<Of64AndSums<kSign>>(last_sums, part, last, std::make_index_sequence<36>{}, scale);
  }
  // Adds a tile to the sums, or begins them with it. In some other forms of this loop, also unrolled here, ptxas lets no
  // product overlap anything: it remarks on it (C7512, C7515), and `make test` fails.
  template <Way kWay>
  __device__ __forceinline__ void add(const unsigned char* stage, const float* weights, const void* ones, float factor,
                                      bool fresh) {
    constexpr int kSteps = kMomentsKeys / kWarpKeys, kStep = kWarpKeys * 128 / 16;
    const unsigned char* const last_box = stage + (C::kDim / 64 - 1) * C::kBoxBytes;
    const detail::Operand first(stage, C::kBoxBytes), last(last_box, shared_address(ones) - shared_address(last_box));
    const Place from = place(shared_address(stage), weights);
    Loaded loaded = load(from, 0);
    uint32_t left[2][4];
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      mma_wait<0>();  // the last products have read their left operand
      pin(left[0]);
      pin(left[1]);
      if constexpr (kWay == Way::plain) {
        convert_plain(left, loaded, factor);
      } else {
        convert<kWay == Way::rest>(left, loaded, factor);
      }
      mma_fence();
      const uint64_t columns = first.at(step * kStep), and_ones = last.at(step * (kStep - (kStep << 16)));
      multiply<kWay == Way::plain ? ScaleIn::Neg : ScaleIn::One>(left[0], columns, and_ones, step > 0 || !fresh);
      if constexpr (kWay != Way::rest) multiply<ScaleIn::One>(left[1], columns, and_ones, true);
      mma_commit();
      loaded = load(from, step + 1);  // behind the last sixteen lies memory that is there, and is not looked at
    }
    settle();
  }
  // Into the row's partial, with (k - c) on both sides; and the sums start anew.
  __device__ __forceinline__ void add_to(float* partial, const float* all_centre, bool fresh) {
    constexpr ProductTile kTile = key_tile(C::kDim, kBlock, false);
    const float low = last_sums[32], high = last_sums[34];
    float out[kCount];
#pragma unroll
    for (int i = 0; i < kCount / 4 - 1; ++i) {
      const float* const from = kWide && i < 8 ? sums + 4 * i : last_sums + 4 * (i % 8);
      const float2 c = *reinterpret_cast<const float2*>(&all_centre[kTile.first_column + 8 * i + threadIdx.x % 4 * 2]);
      out[4 * i] = fmaf(-low, c.x, from[0]), out[4 * i + 1] = fmaf(-low, c.y, from[1]);
      out[4 * i + 2] = fmaf(-high, c.x, from[2]), out[4 * i + 3] = fmaf(-high, c.y, from[3]);
    }
    const bool first = threadIdx.x % 4 == 0;
    out[kCount - 4] = first ? low : 0, out[kCount - 3] = 0, out[kCount - 2] = first ? high : 0, out[kCount - 1] = 0;
    flush(reinterpret_cast<float4*>(partial + partial_matrix(C::kDim) + kTile.from), out, fresh, sums_max, partial_max);
  }
  __device__ __forceinline__ void finish(float* partial) const {
    if (threadIdx.x % 128 != 0) return;
    reinterpret_cast<PartialHead*>(partial)->matrix_max[key_tile(C::kDim, kBlock, false).warpgroup] = partial_max;
  }
};

// What a warpgroup does: 64 rows of the sums of a bundle's row.
template <class C, int kBlock, int kColumns>
__device__ __forceinline__ void form_moments(MomentsShared<C>& s, const Params& p, int row) {
  MomentsTask<C, kBlock, kColumns> task;
  define(task.sums);
  define(task.last_sums);
  uint32_t slot = 0, parity = 0, units = 0;
  int tiles = 0;       // in the sums
  bool fresh = true;   // nothing is in the partial
  bool extra = false;  // the tile of keys that had been the heaviest: a unit's last
  int flags = 0, partial = 0;
  const auto to = [&] { return p.partials + int64_t{partial + row} * partial_floats(C::kDim, false); };
  for (;;) {
    const int at = extra ? C::kStages : static_cast<int>(slot);
    s.full[at].wait(extra ? units++ & 1 : parity);
    if (!extra) flags = s.head[at].flags, partial = s.head[at].partial;
    if (flags & kStop) break;
    if (!extra && (flags & kFresh)) {
      fresh = true, tiles = 0;
      task.begin(s.centre[row], s.plain[row], s.precise[row]);
    }
    const unsigned char* const stage = extra ? s.extra : s.stage[at];
    const float factor = task.follow(s.head[at].max[row], tiles == 0);
    const float* const weights = s.weights[at][row];
    if (task.plain) {
      task.template add<Way::plain>(stage, weights, s.ones, factor, tiles == 0);
    } else {
      task.template add<Way::shifted>(stage, weights, s.ones, factor, tiles == 0);
      if (task.precise) task.template add<Way::rest>(stage, weights, s.ones, factor, false);
    }
    ++tiles;
    if (!extra) s.empty[slot].arrive_for_warp();
    if (extra || tiles == kRestart) {
      task.add_to(to(), s.centre[row], fresh);
      fresh = false, tiles = 0;
    }
    if (extra) {
      task.finish(to());
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
  auto& s = *reinterpret_cast<MomentsShared<C>*>(dynamic_tiles);
  if (threadIdx.x == 0) {
    constexpr int kMultiplying = 4 * kMultipliers * kWarpArrivals;
    for (int i = 0; i < C::kStages; ++i) s.full[i].init(kWarpArrivals), s.empty[i].init(kMultiplying);
    s.full[C::kStages].init(kWeighers * kWarpArrivals);
    s.finished.init(kMultiplying);
    for (int i = 0; i < C::kRawSlots; ++i) s.loaded[0][i].init(kFillArrivals<C>);
    for (int i = 0; i < kWeighers; ++i) s.first_loaded[i].init(kFillArrivals<C>);
    barrier_init_fence();
  }
  for (int at = threadIdx.x; at < kWarpKeys * 32; at += C::kThreads) s.ones[at] = 0x3f803f80;
  fence_async_proxy();
  __syncthreads();
  wait_for_last_kernel();
  let_next_kernel_begin();
  // 640 threads begin with 96 registers each, 480 for the five warpgroups' threads together.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (group == kMultipliers) {
    take_registers<C::kDim == 128 ? 112 : 160>();
    Weigher<C>(s, p).run();
  } else if constexpr (C::kDim == 64) {
    give_registers<80>();
    form_moments<C, 0, 64>(s, p, group);
  } else if (group < 2) {
    take_registers<112>();
    form_moments<C, 0, 128>(s, p, group);
  } else {  // symmetry makes these half as wide
    give_registers<72>();
    form_moments<C, 1, 64>(s, p, group - 2);
  }
}

}  // namespace lla::cuda::sm90::decode
