// The second kernel: the parts of a row put together, in a fixed order; the solve; the output. A row is a cluster's:
// its blocks share the columns of the matrices, the first one solves.
#pragma once

#include <cooperative_groups.h>

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/convert.cuh"
#include "cuda/sm90/decode/factor.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kMostParts = kMostBlocks;
inline constexpr int kPiecesAtOnce = 16;
inline constexpr int kOutputSums = 8;  // over every eighth quad, however many blocks share a row: the same bits

template <int kDim>
struct SolveShared {
  Matrix<kDim> matrix;
  float matrix_factor[2][kMostParts];                      // of the products of each consumer warpgroup
  float key_factor[kMostParts], value_factor[kMostParts];  // scales relative to the first part's
  float heaviest_weight[kMostParts];
  float away[kMostParts];  // heaviest_weight (k - mean) x
  float pieces[kPiecesAtOnce][kDim];
  float mean_key[kDim], stream_mean[kDim], from_mean[kDim], x[kDim];
  float mean_value[kDim], value_sum[kDim];
  float output[kDim / 16][kOutputSums][16];
  float reduced[kSolveThreads / 32];
  float stream_x, from_mean_x;
  int32_t bad;
};

template <class T, class Op>
__device__ __forceinline__ T block_reduce(T x, float* scratch, Op op) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, by));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[0];
#pragma unroll
  for (int w = 1; w < kSolveThreads / 32; ++w) x = op(x, scratch[w]);
  return x;
}

// Matrices are taken in strips of 16 rows, as one warp of the consumers holds them: rows g and g + 8 of a
// thread, of every eight columns (a quad) two. A block takes every kCluster-th strip; its warps share them out.
template <int kDim, int kCluster>
struct RowSolve {
  static constexpr int kStrips = kDim / 16 / kCluster;             // of a block
  static constexpr int kSplit = kSolveThreads / 32 / kStrips;      // warps that share a strip's quads
  static constexpr int kQuads = (kDim / 8 + kSplit - 1) / kSplit;  // of a warp, at most
  static constexpr int kAtOnce = kQuads < 8 ? kQuads : 8;

  SolveShared<kDim>& s;
  const Params& p;
  const RowRecord record;
  const int parts;
  const float* const partials;  // of the first part
  const int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank;
  const int strip, sub;  // this warp's strip, and which of its quads
  float total, stream;   // weights: of all keys, of all but the heaviest
  float key_scale, value_scale;

  __device__ RowSolve(SolveShared<kDim>& shared, const Params& params, int row, int rank_)
      : s(shared),
        p(params),
        record(params.records[row]),
        parts(record.last - record.first + 1),
        partials(params.partials + int64_t{row + record.first} * partial_floats(kDim)),
        rank(rank_),
        strip(rank_ + (threadIdx.x / 32 / kSplit) * kCluster),
        sub(threadIdx.x / 32 % kSplit) {}

  __device__ __forceinline__ const float* partial(int part) const {
    return partials + int64_t{part} * partial_floats(kDim);
  }
  // 0: reference key, 1: heaviest key, 2: its value.
  __device__ __forceinline__ const float* vector(int part, int which) const {
    return partial(part) + kPartialHead + which * kDim;
  }

  // Weights of the parts relative to the row's maximum. Says whether the row is not usable.
  __device__ bool weigh() {
    const auto head_of = [&](int part) { return *reinterpret_cast<const PartialHead*>(partial(part)); };
    float top = -INFINITY, invalid = record.invalid != 0;
    for (int i = thread; i < parts; i += kSolveThreads) {
      const PartialHead head = head_of(i);
      if (head.omega != 0) top = fmaxf(top, static_cast<float>(head.omega_max));
      if (head.heaviest_omega != 0) top = fmaxf(top, static_cast<float>(head.heaviest_max));
      invalid += static_cast<float>(head.invalid);
    }
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto plus = [](float a, float b) { return a + b; };
    top = block_reduce(top, s.reduced, larger);
    invalid = block_reduce(invalid, s.reduced, plus);
    const PartialHead first = head_of(0);
    key_scale = first.key_scale, value_scale = first.value_scale;
    const int max = top > -INFINITY ? static_cast<int>(top) : 0;
    float omega = 0, heaviest = 0;
    for (int i = thread; i < parts; i += kSolveThreads) {
      const PartialHead head = head_of(i);
      const float own = head.heaviest_omega * four_to(min(head.heaviest_max - max, 40));
      omega += head.omega * four_to(min(head.omega_max - max, 40));
      heaviest += own;
      s.key_factor[i] = key_scale / head.key_scale;
      s.value_factor[i] = value_scale / head.value_scale;
      for (int g = 0; g < 2; ++g) s.matrix_factor[g][i] = four_to(min(head.matrix_max[g] - max, 40));
      s.heaviest_weight[i] = own;
    }
    stream = block_reduce(omega, s.reduced, plus);
    total = stream + block_reduce(heaviest, s.reduced, plus);
    __syncthreads();
    return invalid > 0;
  }

  // Sums over keys of column d: in the quad behind those of the keys.
  __device__ __forceinline__ static int sum_offset(const ProductTile& block, int d) {
    return partial_matrix(kDim) + block.from + (block.quads * 128 + d % 64 / 16 * 32 + d % 8 * 4) * 4 + d % 16 / 8 * 2;
  }
  __device__ void means() {
    const float inverse = 1 / total;
    for (int e = thread; e < 2 * kDim; e += kSolveThreads) {
      const bool value = e >= kDim;
      const int d = e % kDim;
      const ProductTile block = value ? value_tile(kDim, d / 64) : key_tile(kDim, d / 64);
      const int at = sum_offset(block, d);
      float sum = 0, heavy = 0;
#pragma unroll 4
      for (int i = 0; i < parts; ++i) {
        const float weight = s.heaviest_weight[i] / total;  // exactly 1 where there is one key
        const float scale = value ? s.value_factor[i] : s.key_factor[i];
        sum = fmaf(s.matrix_factor[block.warpgroup][i] * scale, partial(i)[at], sum);
        heavy = fmaf(weight * (value ? 1 : scale), vector(i, value ? 2 : 1)[d], heavy);
      }
      if (value) {
        s.value_sum[d] = sum;
        s.mean_value[d] = fmaf(sum * inverse, 1 / value_scale, heavy);
      } else {
        const float mean = fmaf(sum, inverse, heavy), of_stream = stream > 0 ? sum / stream : 0;
        s.mean_key[d] = mean, s.stream_mean[d] = of_stream, s.from_mean[d] = of_stream - mean;
      }
    }
    __syncthreads();
  }

  // Up to kAtOnce quads of this warp's strip, from the n-th of its own on, over all parts: many loads in flight.
  __device__ __forceinline__ void gather(float4 (&sum)[kAtOnce], const ProductTile& block, int n, bool values) const {
    const float* const from = partials + partial_matrix(kDim) + block.from + (strip % 4 * 32 + lane) * 4;
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) sum[e] = {0, 0, 0, 0};
    constexpr int kParts = kAtOnce < 8 ? 8 / kAtOnce : 1;
#pragma unroll 1
    for (int first = 0; first < parts; first += kParts) {
      float4 v[kParts][kAtOnce];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float* const here = from + int64_t{first + i} * partial_floats(kDim);
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          const int quad = sub + (n + e) * kSplit;
          const bool there = quad < block.quads && first + i < parts;
          v[i][e] = there ? *reinterpret_cast<const float4*>(here + quad * 512) : float4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (first + i >= parts) break;
        const int part = first + i;
        const float f = s.matrix_factor[block.warpgroup][part] * s.key_factor[part] *
                        (values ? s.value_factor[part] : s.key_factor[part]);
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          sum[e].x = fmaf(f, v[i][e].x, sum[e].x), sum[e].y = fmaf(f, v[i][e].y, sum[e].y);
          sum[e].z = fmaf(f, v[i][e].z, sum[e].z), sum[e].w = fmaf(f, v[i][e].w, sum[e].w);
        }
      }
    }
  }

  // This block's strips of the covariance, into the first block's matrix.
  __device__ void covariance(Matrix<kDim>& to) {
    const ProductTile block = key_tile(kDim, strip / 4);
    const int i0 = 16 * strip + lane / 4, t = lane % 4;
    const float inverse = 1 / total, part = stream * inverse;
#pragma unroll 1
    for (int n = 0; n < kQuads; n += kAtOnce) {
      float4 sum[kAtOnce];
      gather(sum, block, n, false);
      const auto column = [&](int e) { return block.first_column + 8 * (sub + (n + e) * kSplit) + 2 * t; };
      const auto inside = [&](int e) { return sub + (n + e) * kSplit < block.quads; };
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (!inside(e)) continue;
        const int j = column(e);
        const auto centred = [&](float x, int row, int col) {
          const float between = s.from_mean[row] * s.from_mean[col] - s.stream_mean[row] * s.stream_mean[col];
          return fmaf(x, inverse, part * between);
        };
        const float4 v = sum[e];
        sum[e] = {centred(v.x, i0, j), centred(v.y, i0, j + 1), centred(v.z, i0 + 8, j), centred(v.w, i0 + 8, j + 1)};
      }
#pragma unroll 1
      for (int first = 0; first < parts; first += kPiecesAtOnce) {
        const int count = min(kPiecesAtOnce, parts - first);
        __syncthreads();
        for (int e = thread; e < count * kDim; e += kSolveThreads) {
          const int piece = first + e / kDim, d = e % kDim;
          s.pieces[e / kDim][d] = vector(piece, 1)[d] * s.key_factor[piece] - s.mean_key[d];
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          const float weight = s.heaviest_weight[first + i] * inverse;
          if (weight == 0) continue;
          const float* d = s.pieces[i];
          const float low = weight * d[i0], high = weight * d[i0 + 8];
#pragma unroll
          for (int e = 0; e < kAtOnce; ++e) {
            if (!inside(e)) continue;
            const float2 k = *reinterpret_cast<const float2*>(&d[column(e)]);
            sum[e].x = fmaf(low, k.x, sum[e].x), sum[e].y = fmaf(low, k.y, sum[e].y);
            sum[e].z = fmaf(high, k.x, sum[e].z), sum[e].w = fmaf(high, k.y, sum[e].w);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (!inside(e)) continue;
        const int j = column(e);
        const auto put = [&](float x, int row, int col) {
          if (col <= row) to.at[row][col] = x;
          if (col > row && col / 64 != row / 64) to.at[col][row] = x;
        };
        put(sum[e].x, i0, j), put(sum[e].y, i0, j + 1), put(sum[e].z, i0 + 8, j), put(sum[e].w, i0 + 8, j + 1);
      }
    }
  }

  // Ridge, right-hand side and limits of the pivots. By the first block.
  __device__ void prepare(DType dtype) {
    Matrix<kDim>& m = s.matrix;
    __syncthreads();
    const int d = thread;
    bool removed = false, bad = false;
    if (d < kDim) {
      const int64_t at_q = row_offset(p.q, record.batch, record.position, record.head);
      const int64_t at_ridge = row_offset(p.ridge, record.batch, record.position, record.head);
      float ridge = INFINITY, q = 0;
      if (d < p.dim) {
        ridge = static_cast<const float*>(p.ridge.data)[at_ridge + d * p.ridge.stride[3]];
        q = load_as<float>(p.q.data, dtype, at_q + d * p.q.stride[3]);
      }
      bad = !(ridge >= 0) || !(fabsf(q) <= 3e38f);
      const float scaled = ridge * key_scale * key_scale;
      removed = !(scaled <= 3e38f) && ridge >= 0;
      const float mean = s.mean_key[d], diagonal = m.at[d][d];
      m.at[kDim][d] = removed ? 0 : (q - vector(0, 0)[d]) * key_scale - mean;
      m.at[kDim + 1][d] = m.at[kDim + 2][d] = m.at[kDim + 3][d] = 0;
      m.at[d][d] = removed ? 1 : diagonal + scaled;
      // What rounding is relative to: the sums before the mean was taken off.
      m.start[d] = removed ? 1 : fmaf(stream / total * s.stream_mean[d], s.stream_mean[d], diagonal) + scaled;
      m.limit[d] = m.start[d] * (ridge > 0 ? 0x1p-20f : 0x1p-16f);
      s.x[d] = removed;
    }
    if (bad) s.bad = 1;
    const bool any = __syncthreads_or(removed);
    if (any) {
      for (int e = thread; e < kDim * kDim; e += kSolveThreads) {
        const int row = e / kDim, column = e % kDim;
        if (column < row && (s.x[row] != 0 || s.x[column] != 0)) m.at[row][column] = 0;
      }
    }
  }

  // What the output needs of x, by all blocks.
  __device__ void along_x() {
    const int lane = thread % 32;
    for (int piece = thread / 32; piece < parts + 2; piece += kSolveThreads / 32) {
      float sum = 0;
      for (int d = lane; d < kDim; d += 32) {
        const float along = piece == parts       ? s.stream_mean[d]
                            : piece == parts + 1 ? s.from_mean[d]
                                                 : vector(piece, 1)[d] * s.key_factor[piece] - s.mean_key[d];
        sum = fmaf(along, s.x[d], sum);
      }
#pragma unroll
      for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
      if (lane == 0) {
        if (piece == parts) {
          s.stream_x = sum;
        } else if (piece == parts + 1) {
          s.from_mean_x = sum;
        } else {
          s.away[piece] = sum * s.heaviest_weight[piece] / total;
        }
      }
    }
    __syncthreads();
  }

  static constexpr int kOwnSums = kOutputSums / kSplit;  // of a warp
  // Quads of V''ᵀK'' times x.
  __device__ __forceinline__ void multiply_x(const float4 (&v)[kAtOnce], int n, float (&low)[kOwnSums],
                                             float (&high)[kOwnSums]) const {
    static_assert(kAtOnce % kOwnSums == 0);
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      const int quad = sub + (n + e) * kSplit;
      if (quad >= kDim / 8) continue;
      float &a = low[e % kOwnSums], &b = high[e % kOwnSums];
      const float2 x = *reinterpret_cast<const float2*>(&s.x[8 * quad + 2 * (lane % 4)]);
      a = fmaf(v[e].x, x.x, fmaf(v[e].y, x.y, a));
      b = fmaf(v[e].z, x.x, fmaf(v[e].w, x.y, b));
    }
  }
  // o of this block's strips. `held`: all quads, where they fit.
  __device__ void output(const float4 (&held)[kAtOnce], bool have, bool nan) {
    const ProductTile block = value_tile(kDim, strip / 4);
    float low[kOwnSums]{}, high[kOwnSums]{};
    if (have) {
      multiply_x(held, 0, low, high);
    } else {
#pragma unroll 1
      for (int n = 0; n < kQuads; n += kAtOnce) {
        float4 v[kAtOnce];
        gather(v, block, n, true);
        multiply_x(v, n, low, high);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnSums; ++i) {
      const float a = keys_sum(low[i]), b = keys_sum(high[i]);
      float(&to)[16] = s.output[threadIdx.x / 32 / kSplit][sub + i * kSplit];
      if (lane % 4 == 0) to[lane / 4] = a, to[8 + lane / 4] = b;
    }
    __syncthreads();
    if (thread >= 16 * kStrips) return;
    const int j = 16 * (rank + thread / 16 * kCluster) + thread % 16;
    if (j >= p.value_dim) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kOutputSums; ++i) sum += s.output[thread / 16][i][thread % 16];
    const float inverse = 1 / total, mean = s.mean_value[j];
    float o = fmaf((sum - s.value_sum[j] * s.stream_x) * inverse, 1 / value_scale, mean);
    if (stream > 0) o = fmaf(stream * inverse * s.from_mean_x, s.value_sum[j] / stream / value_scale - mean, o);
    for (int i = 0; i < parts; ++i) o = fmaf(s.away[i], vector(i, 2)[j] - mean, o);
    store(j, nan ? NAN : o);
  }
  __device__ void store(int j, float o) {
    const int64_t at = row_offset(p.o, record.batch, record.position, record.head);
    store_as(p.o.data, p.o.dtype, at + j * p.o.stride[3], o);
  }
  __device__ void report(int32_t status) const { report_row(p, record, status); }
};

template <int kDim, bool kBf16, int kCluster>
__global__ void __launch_bounds__(kSolveThreads) solve_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  SolveShared<kDim>& s = *reinterpret_cast<SolveShared<kDim>*>(memory);
  namespace cg = cooperative_groups;
  const auto cluster = cg::this_cluster();
  const int rank = kCluster == 1 ? 0 : cluster.block_rank();
  const int row = blockIdx.x / kCluster;
  wait_for_last_kernel();
  let_next_kernel_begin();
  if (row >= *p.live_rows) return;
  if (p.decide_by_live_rows && (*p.live_rows <= few_rows(p.multiprocessors)) != (kCluster > 1)) return;
  RowSolve<kDim, kCluster> solve(s, p, row, rank);
  if (threadIdx.x == 0) s.bad = 0;
  const bool invalid = solve.weigh();
  if (invalid) {
    if (rank == 0) {
      for (int j = threadIdx.x; j < p.value_dim; j += kSolveThreads) solve.store(j, NAN);
      if (threadIdx.x == 0) solve.report(LLA_ROW_INVALID);
    }
    return;
  }
  if (solve.total == 0) {  // no key
    if (rank == 0) {
      for (int j = threadIdx.x; j < p.value_dim; j += kSolveThreads) solve.store(j, 0);
      if (threadIdx.x == 0) solve.report(0);
    }
    return;
  }
  solve.means();
  Matrix<kDim>* first = &s.matrix;
  if constexpr (kCluster > 1) first = cluster.map_shared_rank(first, 0);
  solve.covariance(*first);
  using Solve = RowSolve<kDim, kCluster>;
  constexpr bool kHold = kCluster > 1;
  static_assert(!kHold || Solve::kQuads <= Solve::kAtOnce);
  float4 held[Solve::kAtOnce];
  if constexpr (kHold) {
    solve.gather(held, value_tile(kDim, solve.strip / 4), 0, true);
    cluster.sync();
  }
  if (rank == 0) {
    solve.prepare(kBf16 ? DType::bf16 : DType::f16);
    factor(s.matrix);
    back_substitute(s.matrix, s.x);
    __syncthreads();
  }
  if constexpr (kCluster > 1) {
    cluster.sync();
    if (rank != 0) {
      const SolveShared<kDim>* const there = cluster.map_shared_rank(&s, 0);
      for (int d = threadIdx.x; d < kDim; d += kSolveThreads) s.x[d] = there->x[d];
      if (threadIdx.x == 0) s.bad = there->bad;
    }
    cluster.sync();
  }
  __syncthreads();
  solve.along_x();
  bool finite = true;
  if (threadIdx.x < kDim) {
    finite = fabsf(s.x[threadIdx.x]) <= 3e38f && fabsf(s.mean_value[threadIdx.x]) <= 3e38f;
  }
  const bool nan = __syncthreads_or(!finite) || s.bad;
  solve.output(held, kHold, nan);
  if (rank == 0 && threadIdx.x < 32) {
    const bool broken = smallest_pivot(s.matrix) <= kLeastPivot;
    if (threadIdx.x == 0) solve.report(nan ? LLA_ROW_NAN : broken ? LLA_ROW_BREAKDOWN : LLA_ROW_OK);
  }
}

}  // namespace lla::cuda::sm90::decode
