// The second kernel: the parts of a row put together, in a fixed order; the solve; the output. A row is a cluster's:
// its blocks share the columns of the matrices, the first one solves.
#pragma once

#include <cooperative_groups.h>

#include "cuda/sm90/decode/doubt.cuh"
#include "cuda/sm90/decode/merge.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim, int kCluster, int kBundle = 1>
struct RowSolve : RowParts<kDim, kCluster, kBundle> {
  using Parts = RowParts<kDim, kCluster, kBundle>;
  using Parts::kSplit, Parts::kStrips, Parts::kQuads, Parts::kAtOnce;
  using Parts::Parts, Parts::s, Parts::p, Parts::record, Parts::parts, Parts::thread, Parts::lane, Parts::rank;
  using Parts::strip, Parts::sub, Parts::total, Parts::stream, Parts::key_scale, Parts::value_scale;
  float ridge = INFINITY, q = 0, reference = 0;  // of this thread's column

  // Asks at once for everything that waits for nothing else, the first part's tiles among it, and weighs the parts.
  // Returns whether the row is not usable.
  __device__ __forceinline__ bool begin(float4 (&keys)[Parts::kKeyTiles], DType dtype) {
    this->load_keys(keys, 0);
    this->ask_for_means();
    if (rank == 0) ask(dtype);
    if (thread == 0) s.bad = 0, s.largest_output = 0;
    return this->weigh();
  }
  // Asks for the query, the ridge and the reference key. By the first block.
  __device__ __forceinline__ void ask(DType dtype) {
    if (thread < kDim) reference = this->vector(0, 0)[thread];
    if (thread >= p.dim) return;
    const int64_t at_q = row_offset(p.q, record.batch, record.position, record.head);
    const int64_t at_ridge = row_offset(p.ridge, record.batch, record.position, record.head);
    ridge = static_cast<const float*>(p.ridge.data)[at_ridge + thread * p.ridge.stride[3]];
    q = load_as<float>(p.q.data, dtype, at_q + thread * p.q.stride[3]);
  }

  // Ridge, right-hand side and limits of the pivots. By the first block. Returns whether no pivot can come near to what
  // is reported: each is at least its ridge.
  __device__ bool prepare() {
    __syncthreads();
    const int d = thread;
    Element own;
    if (d < kDim) {
      if (!(ridge >= 0) || !(fabsf(q) <= 3e38f)) s.bad = 1;
      own.ridge = ridge, own.scaled = ridge * key_scale * key_scale;
      own.rhs = (q - reference) * key_scale - s.mean_key[d];
      // What rounding is relative to: the sums before the mean was taken off.
      own.uncentred = fmaf(stream / total * s.stream_mean[d], s.stream_mean[d], s.square.at(d, d));
    }
    return prepare_row(s.square, s.matrix, own, s.x);
  }
  // x of the row, into s.x. By the first block. Returns whether a pivot was all rounding.
  __device__ bool solve() {
    const bool safe = prepare();
    const bool eliminated = solve_matrix(s.square, s.matrix, s.gradients, safe && !p.eliminate, s.x);
    return eliminated && thread < 32 && smallest_pivot(s.matrix) <= kLeastPivot;
  }

  // What the output needs of x, by all blocks.
  __device__ void along_x() {
#pragma unroll 1
    for (int piece = thread / 32; piece < parts + 2; piece += kSolveThreads / 32) {
      float sum = 0;
#pragma unroll
      for (int d = lane; d < kDim; d += 32) {
        const float along = piece == parts           ? s.stream_mean[d]
                            : piece == parts + 1     ? s.from_mean[d]
                            : parts <= kPiecesAtOnce ? s.pieces[piece][d]
                                                     : this->piece_at(piece, d);
        sum = fmaf(along, s.x[d], sum);
      }
      sum = warp_reduce(sum, [](float a, float b) { return a + b; });
      if (lane == 0) {
        if (piece == parts) {
          s.stream_x = sum;
        } else if (piece == parts + 1) {
          s.from_mean_x = sum;
        } else {
          s.away[piece] = sum * s.heaviest_share[piece];
        }
      }
    }
    __syncthreads();
  }

  static constexpr int kOwnSums = kOutputSums / kSplit;  // of a warp
  // V''ᵀK'' times x, summed over every eighth quad: the sums of a warp.
  struct Sums {
    float low[kOwnSums]{}, high[kOwnSums]{};
  };
  __device__ __forceinline__ void multiply_x(Sums& sums, const float4 (&v)[kAtOnce], int n) const {
    static_assert(kAtOnce % kOwnSums == 0);
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int quad = sub + (n + e) * kSplit;
      if (quad >= kDim / 8) continue;
      float &a = sums.low[e % kOwnSums], &b = sums.high[e % kOwnSums];
      const float2 x = *reinterpret_cast<const float2*>(&s.x[8 * quad + 2 * (lane % 4)]);
      a = fmaf(v[e].x, x.x, fmaf(v[e].y, x.y, a));
      b = fmaf(v[e].z, x.x, fmaf(v[e].w, x.y, b));
    }
  }
  // o of these strips, from the sums; `largest` becomes the largest |o| of the row.
  __device__ void output(const Sums& sums, bool nan, unsigned* largest) {
#pragma unroll
    for (int i = 0; i < kOwnSums; ++i) {
      const float a = keys_sum(sums.low[i]), b = keys_sum(sums.high[i]);
      float(&to)[16] = s.output[threadIdx.x / 32 / kSplit][sub + i * kSplit];
      if (lane % 4 == 0) to[lane / 4] = a, to[8 + lane / 4] = b;
    }
    __syncthreads();
    const int j = 16 * (kStrips > 1 ? thread / 16 : strip) + thread % 16;
    if (thread < 16 * kStrips && j < p.value_dim) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kOutputSums; ++i) sum += s.output[thread / 16][i][thread % 16];
      const float inverse = 1 / total, mean = s.mean_value[j];
      float o = fmaf((sum - s.value_sum[j] * s.stream_x) * inverse, 1 / value_scale, mean);
      if (stream > 0) o = fmaf(stream * inverse * s.from_mean_x, s.value_sum[j] / stream / value_scale - mean, o);
#pragma unroll Parts::kPartsAtOnce
      for (int i = 0; i < parts; ++i) o = fmaf(s.away[i], this->vector(i, 2)[j] - mean, o);
      store(j, nan ? NAN : o);
      atomicMax(largest, __float_as_uint(fabsf(o)));
    }
  }
  // Whether what the sums have lost may show in the output. By a warp of the first block.
  __device__ bool doubtful() const {
    const float value = 0x1p-3f / value_scale;  // above the largest, by up to two
    const float output = __uint_as_float(s.largest_output);
    return output > 0 && output < least_output(size_of_terms(s.matrix, s.x), value);
  }
  __device__ bool outgrown() const { return __uint_as_float(s.largest_output) >= least_infinite(p.o.dtype); }
  __device__ void store(int j, float o) {
    const int64_t at = row_offset(p.o, record.batch, record.position, record.head);
    store_as(p.o.data, p.o.dtype, at + j * p.o.stride[3], o);
  }
  __device__ void report(int32_t status) const { report_row(p, record, status); }
  // A row without a solve.
  __device__ void only(float o, int32_t status) {
    if (rank != 0) return;
#pragma unroll 1
    for (int j = thread; j < p.value_dim; j += kSolveThreads) store(j, o);
    if (thread == 0) report(status);
  }
};

template <int kDim, bool kBf16, int kCluster>
__global__ void __launch_bounds__(kSolveThreads, kCluster > 1 ? 1 : solves_at_once(kDim))
    solve_kernel(const __grid_constant__ Params p) {
  auto& s = *reinterpret_cast<SolveShared<kDim>*>(dynamic_tiles);
  namespace cg = cooperative_groups;
  const auto cluster = cg::this_cluster();
  const int rank = kCluster == 1 ? 0 : cluster.block_rank();
  const int row = blockIdx.x / kCluster;
  wait_for_last_kernel();
  let_next_kernel_begin();
  const int32_t live = *p.live_rows;
  const RowRecord record = p.records[row];
  if (row >= live) return;
  if (p.decide_by_live_rows && (live <= few_rows(p.multiprocessors, kDim)) != (kCluster > 1)) return;
  using Solve = RowSolve<kDim, kCluster>;
  Solve solve(s, p, record, row, rank);
  float4 keys[Solve::kKeyTiles];
  const bool invalid = solve.begin(keys, kBf16 ? DType::bf16 : DType::f16);
  if (invalid) return solve.only(NAN, LLA_ROW_INVALID);
  if (solve.total == 0) return solve.only(0, LLA_ROW_OK);  // no key
  solve.means();
  Square<kDim>* first = &s.square;
  unsigned* largest = &s.largest_output;
  if constexpr (kCluster > 1) {
    first = cluster.map_shared_rank(first, 0);
    largest = cluster.map_shared_rank(largest, 0);
  }
  solve.covariance(*first, keys);
  static_assert(kCluster == 1 || Solve::kQuads <= Solve::kAtOnce);
  constexpr int kBatches = kCluster > 1 ? 2 : Solve::kQuads / Solve::kAtOnce;
  float4 held[kBatches][Solve::kAtOnce];  // of a cluster's second block: its strip and the first's
  const int strips = rank == 0 ? 0 : rank == 1 ? 2 : 1;
  if constexpr (kCluster > 1) {
    cluster.sync();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= strips) continue;
      solve.strip = rank - i;
      solve.load_values(held[i], 0, 0);
      solve.add_values(held[i], 0);
    }
  }
  const bool singular = rank == 0 && solve.solve();
  if (kCluster == 1) solve.load_values(held[0], 0, 0);  // not before: the solve needs the registers
  if constexpr (kCluster > 1) {
    cluster.sync();
    if (rank != 0) {
      const SolveShared<kDim>* const there = cluster.map_shared_rank(&s, 0);
      for (int d = threadIdx.x; d < kDim; d += kSolveThreads) s.x[d] = there->x[d];
      if (threadIdx.x == 0) s.bad = there->bad;
    }
    cluster.sync();
  }
  if (kCluster == 1 && kBatches == 2) solve.load_values(held[kBatches - 1], 0, Solve::kAtOnce);
  solve.along_x();
  bool finite = true;
  if (threadIdx.x < kDim) {
    finite = fabsf(s.x[threadIdx.x]) <= 3e38f && fabsf(s.mean_value[threadIdx.x]) <= 3e38f;
  }
  const bool nan = __syncthreads_or(!finite) || s.bad;
  if constexpr (kCluster > 1) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= strips) continue;
      solve.strip = rank - i;
      typename Solve::Sums sums;
      solve.multiply_x(sums, held[i], 0);
      __syncthreads();
      solve.output(sums, nan, largest);
    }
    cluster.sync();
  } else {
    typename Solve::Sums sums;
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      solve.add_values(held[i], i * Solve::kAtOnce);
      solve.multiply_x(sums, held[i], i * Solve::kAtOnce);
    }
    solve.output(sums, nan, largest);
    __syncthreads();
  }
  if (rank == 0 && threadIdx.x < 32) {
    const bool broken = singular || solve.doubtful() || solve.outgrown();
    if (threadIdx.x == 0) solve.report(nan ? LLA_ROW_NAN : broken ? LLA_ROW_BREAKDOWN : LLA_ROW_OK);
  }
}

}  // namespace lla::cuda::sm90::decode
