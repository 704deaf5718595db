// The second kernel: the parts of a row put together, in a fixed order; the solve; the output. A row is a cluster's:
// its blocks share the columns of the matrices, the first one solves.
#pragma once

#include <cooperative_groups.h>

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/factor.cuh"
#include "cuda/sm90/decode/shared.cuh"
#include "cuda/sm90/decode/walk.cuh"

namespace lla::cuda::sm90::decode {

inline constexpr int kMostParts = 256;  // blocks of the streaming kernel
inline constexpr int kPiecesAtOnce = 16;

template <int kDim>
struct SolveShared {
  Matrix<kDim> matrix;
  float matrix_factor[2][kMostParts];  // keys by keys; keys by values are value_factor / key_factor times that
  float key_factor[kMostParts], value_factor[kMostParts];  // scales relative to the first part's
  float sums_factor[kMostParts], heaviest_weight[kMostParts];
  float away[kMostParts];  // heaviest_weight (k - mean) x
  float pieces[kPiecesAtOnce][kDim];
  float mean_key[kDim], stream_mean[kDim], from_mean[kDim], x[kDim];
  float mean_value[kDim], value_sum[kDim];
  float output[kSolveThreads / 32][kDim];
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

template <int kDim, int kCluster>
struct RowSolve {
  static constexpr int kGroups = kDim / 64;        // of the matrix: 64 rows each
  static constexpr int kShare = 2 / kGroups;       // warpgroups that share a group's columns
  static constexpr int kKeyQuads = kDim / 8;       // eight columns each, of group 0
  static constexpr int kStep = kShare * kCluster;  // a thread takes every so manieth
  static constexpr int kValueQuads = (kKeyQuads + kStep - 1) / kStep;

  SolveShared<kDim>& s;
  const Params& p;
  const RowRecord record;
  const int parts;
  const float* const slots;  // of the first part
  const int thread = threadIdx.x, rank;
  float total, stream;  // weights: of all keys, of all but the heaviest
  float key_scale, value_scale;

  __device__ RowSolve(SolveShared<kDim>& shared, const Params& params, int row, int rank_)
      : s(shared), p(params), record(params.records[row]), parts(record.last - record.first + 1),
        slots(params.slots + int64_t{row + record.first} * slot_floats(kDim)), rank(rank_) {}

  __device__ __forceinline__ const float* slot(int part) const { return slots + int64_t{part} * slot_floats(kDim); }
  __device__ __forceinline__ const float* vector(int part, int which) const {
    return slot(part) + kSlotHead + which * kDim;
  }

  // Weights of the parts relative to the row's maximum. Says whether the row is not usable.
  __device__ bool weigh() {
    float top = -INFINITY, invalid = record.invalid != 0;
    SlotHead head{};
    const bool mine = thread < parts;
    if (mine) {
      head = *reinterpret_cast<const SlotHead*>(slot(thread));
      if (head.omega != 0) top = static_cast<float>(head.sums_max);
      if (head.heaviest_omega != 0) top = fmaxf(top, static_cast<float>(head.heaviest_max));
      invalid += static_cast<float>(head.invalid);
    }
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto plus = [](float a, float b) { return a + b; };
    top = block_reduce(top, s.reduced, larger);
    invalid = block_reduce(invalid, s.reduced, plus);
    const SlotHead& first = *reinterpret_cast<const SlotHead*>(slot(0));
    key_scale = first.key_scale, value_scale = first.value_scale;
    float omega = 0, heaviest = 0;
    if (mine) {
      const int max = top > -INFINITY ? static_cast<int>(top) : 0;
      const float key = key_scale / head.key_scale;
      const float sums = four_to(min(head.sums_max - max, 40));
      omega = head.omega * sums;
      heaviest = head.heaviest_omega * four_to(min(head.heaviest_max - max, 40));
      s.key_factor[thread] = key;
      s.value_factor[thread] = value_scale / head.value_scale;
      for (int g = 0; g < kGroups; ++g)
        s.matrix_factor[g][thread] = four_to(min(head.matrix_max[g] - max, 40)) * key * key;
      s.sums_factor[thread] = sums;
      s.heaviest_weight[thread] = heaviest;
    }
    stream = block_reduce(omega, s.reduced, plus);
    total = stream + block_reduce(heaviest, s.reduced, plus);
    __syncthreads();
    return invalid > 0;
  }

  __device__ void means() {
    const float inverse = 1 / total;
    for (int d = thread; d < 2 * kDim; d += kSolveThreads) {
      const bool value = d >= kDim;
      float sum = 0, heavy = 0;
#pragma unroll 4
      for (int i = 0; i < parts; ++i) {
        const float weight = s.heaviest_weight[i] * inverse;
        const float scale = value ? s.value_factor[i] : s.key_factor[i];
        sum = fmaf(s.sums_factor[i] * scale, vector(i, 1)[d], sum);
        heavy = fmaf(weight * (value ? 1 : scale), vector(i, 3)[d], heavy);
      }
      if (value) {
        s.value_sum[d - kDim] = sum;
        s.mean_value[d - kDim] = fmaf(sum * inverse, 1 / value_scale, heavy);
      } else {
        const float mean = fmaf(sum, inverse, heavy), of_stream = stream > 0 ? sum / stream : 0;
        s.mean_key[d] = mean, s.stream_mean[d] = of_stream, s.from_mean[d] = of_stream - mean;
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int group() const { return kGroups == 2 ? thread / 128 : 0; }
  __device__ __forceinline__ int first_quad() const { return (kShare == 2 ? thread / 128 : 0) + kShare * rank; }
  __device__ __forceinline__ int matrix_row() const { return 64 * group() + (thread % 128) / 32 * 16 + thread % 32 / 4; }

  // Four elements (rows i, i + 8, columns j, j + 1) of a matrix, over all parts.
  __device__ __forceinline__ float4 gather(int quad, bool values) const {
    const int at = slot_matrix(kDim) + group() * 64 * 256 + (quad * 128 + thread % 128) * 4;
    float4 sum{0, 0, 0, 0};
#pragma unroll 4
    for (int i = 0; i < parts; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(slot(i) + at);
      float f = s.matrix_factor[group()][i];
      if (values) f *= s.value_factor[i] / s.key_factor[i];
      sum.x = fmaf(f, v.x, sum.x), sum.y = fmaf(f, v.y, sum.y);
      sum.z = fmaf(f, v.z, sum.z), sum.w = fmaf(f, v.w, sum.w);
    }
    return sum;
  }

  // This block's columns of the covariance, into the first block's matrix.
  __device__ void covariance(Matrix<kDim>& to) {
    constexpr int kMost = (kKeyQuads + kStep - 1) / kStep;
    const int quads = kKeyQuads - 8 * group();
    const int i0 = matrix_row(), t = thread % 4;
    const float inverse = 1 / total, part = stream * inverse;
    float4 sum[kMost];
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int quad = first_quad() + n * kStep;
      if (quad >= quads) continue;
      const int j = 64 * group() + 8 * quad + 2 * t;
      float4 v = gather(quad, false);
      const auto centred = [&](float x, int row, int column) {
        const float between = s.from_mean[row] * s.from_mean[column] - s.stream_mean[row] * s.stream_mean[column];
        return fmaf(x, inverse, part * between);
      };
      sum[n] = {centred(v.x, i0, j), centred(v.y, i0, j + 1), centred(v.z, i0 + 8, j), centred(v.w, i0 + 8, j + 1)};
    }
    for (int first = 0; first < parts; first += kPiecesAtOnce) {
      const int count = min(kPiecesAtOnce, parts - first);
      __syncthreads();
      for (int e = thread; e < count * kDim; e += kSolveThreads) {
        const int piece = first + e / kDim, d = e % kDim;
        s.pieces[e / kDim][d] = vector(piece, 3)[d] * s.key_factor[piece] - s.mean_key[d];
      }
      __syncthreads();
      for (int i = 0; i < count; ++i) {
        const float weight = s.heaviest_weight[first + i] * inverse;
        if (weight == 0) continue;
        const float* d = s.pieces[i];
        const float low = weight * d[i0], high = weight * d[i0 + 8];
#pragma unroll
        for (int n = 0; n < kMost; ++n) {
          const int quad = first_quad() + n * kStep;
          if (quad >= quads) continue;
          const int j = 64 * group() + 8 * quad + 2 * t;
          sum[n].x = fmaf(low, d[j], sum[n].x), sum[n].y = fmaf(low, d[j + 1], sum[n].y);
          sum[n].z = fmaf(high, d[j], sum[n].z), sum[n].w = fmaf(high, d[j + 1], sum[n].w);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      const int quad = first_quad() + n * kStep;
      if (quad >= quads) continue;
      const int j = 64 * group() + 8 * quad + 2 * t;
      const auto put = [&](float x, int row, int column) {
        if (column <= row) to.at[row][column] = x;
        if (column > row && column / 64 != row / 64) to.at[column][row] = x;
      };
      put(sum[n].x, i0, j), put(sum[n].y, i0, j + 1), put(sum[n].z, i0 + 8, j), put(sum[n].w, i0 + 8, j + 1);
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
      m.drop[d] = ridge > 0 ? 20 : 16;
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
                                                 : vector(piece, 3)[d] * s.key_factor[piece] - s.mean_key[d];
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

  // o of this block's columns.
  __device__ void output(const float4 (&held)[kValueQuads], bool have, bool nan) {
    const int i0 = matrix_row(), t = thread % 4, warp = thread / 32;
    const float low = s.x[i0], high = s.x[i0 + 8];
    const int behind = kKeyQuads - 8 * group();  // quads of keys
#pragma unroll
    for (int n = 0; n < kValueQuads; ++n) {
      const int quad = first_quad() + n * kStep;
      if (quad >= kKeyQuads) continue;
      const float4 v = have ? held[n] : gather(behind + quad, true);
      float a = fmaf(v.x, low, v.z * high), b = fmaf(v.y, low, v.w * high);
#pragma unroll
      for (int by = 4; by < 32; by *= 2) {
        a += __shfl_xor_sync(0xffffffffu, a, by);
        b += __shfl_xor_sync(0xffffffffu, b, by);
      }
      if (thread % 32 < 4) s.output[warp][8 * quad + 2 * t] = a, s.output[warp][8 * quad + 2 * t + 1] = b;
    }
    __syncthreads();
    const int j = thread;
    const bool mine = j < kDim && (j / 8 / kShare) % kCluster == rank;
    if (!mine || j >= p.value_dim) return;
    float sum = 0;
    for (int w = 0; w < kSolveThreads / 32; ++w) {
      const bool made = kShare == 1 || (w / 4) == (j / 8) % 2;
      if (made) sum += s.output[w][j];
    }
    const float inverse = 1 / total, mean = s.mean_value[j];
    float o = fmaf((sum - s.value_sum[j] * s.stream_x) * inverse, 1 / value_scale, mean);
    if (stream > 0)
      o = fmaf(stream * inverse * s.from_mean_x, s.value_sum[j] / stream / value_scale - mean, o);
    for (int i = 0; i < parts; ++i) o = fmaf(s.away[i], vector(i, 4)[j] - mean, o);
    store(j, nan ? NAN : total == 0 ? 0.0f : o);
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
  float4 held[RowSolve<kDim, kCluster>::kValueQuads];
  constexpr bool kHold = kCluster > 1;
  if constexpr (kHold) {
#pragma unroll
    for (int n = 0; n < RowSolve<kDim, kCluster>::kValueQuads; ++n) {
      const int quad = solve.first_quad() + n * solve.kStep;
      if (quad < solve.kKeyQuads) held[n] = solve.gather(solve.kKeyQuads - 8 * solve.group() + quad, true);
    }
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
  if (rank == 0 && threadIdx.x == 0) {
    solve.report(nan ? LLA_ROW_NAN : s.matrix.smallest <= kLeastPivot ? LLA_ROW_BREAKDOWN : LLA_ROW_OK);
  }
}

}  // namespace lla::cuda::sm90::decode
