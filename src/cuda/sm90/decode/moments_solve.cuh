// Between two passes: the parts of a row put together and solved for x, which the second pass reads, and for the size of
// the terms of k.x, by which it knows whether it can trust its sums.
#pragma once

#include "cuda/sm90/decode/solve.cuh"

namespace lla::cuda::sm90::decode {

template <int kDim, bool kBf16, int kCluster>
__global__ void __launch_bounds__(kSolveThreads, kCluster > 1 ? 1 : solves_at_once(kDim))
    moments_solve_kernel(const __grid_constant__ Params p) {
  auto& s = *reinterpret_cast<SolveShared<kDim>*>(dynamic_tiles);
  namespace cg = cooperative_groups;
  const auto cluster = cg::this_cluster();
  const int rank = kCluster == 1 ? 0 : cluster.block_rank();
  constexpr int kBundle = moments_bundle(kDim);
  const int row = blockIdx.x / kCluster, bundle = row / kBundle, of_bundle = row % kBundle;
  wait_for_last_kernel();
  let_next_kernel_begin();
  const int32_t live = *p.live_rows;
  if (bundle >= live || of_bundle >= p.records[bundle].rows) return;
  if (p.decide_by_live_rows && (live * kBundle <= few_rows(p.multiprocessors, kDim)) != (kCluster > 1)) return;
  const RowRecord record = row_of(p, p.records[bundle], of_bundle);
  using Solve = RowSolve<kDim, kCluster, kBundle>;
  Solve solve(s, p, record, bundle, rank, of_bundle);
  float* const to = p.solved_x + int64_t{record.number} * kDim;
  float4 keys[Solve::kKeyTiles];
  const bool invalid = solve.begin(keys, kBf16 ? DType::bf16 : DType::f16);
  if (invalid || solve.total == 0) {  // not usable, or no key
    if (rank != 0) return;
    if (threadIdx.x < kDim) to[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
      p.solved_terms[record.number] = 0;
      solve.report(invalid ? LLA_ROW_INVALID : LLA_ROW_OK);
    }
    return;
  }
  solve.means();
  if (rank == 0 && threadIdx.x < kDim) {
    s.raw_mean[threadIdx.x] = sqrtf(solve.stream / solve.total) * (solve.reference + s.stream_mean[threadIdx.x]);
  }
  Square<kDim>* first = &s.square;
  if constexpr (kCluster > 1) first = cluster.map_shared_rank(first, 0);
  solve.covariance(*first, keys);
  if constexpr (kCluster > 1) cluster.sync();
  if (rank != 0) return;
  const bool broken = solve.solve();
  const bool finite = threadIdx.x >= kDim || fabsf(s.x[threadIdx.x]) <= 3e38f;
  const bool nan = __syncthreads_or(!finite) || s.bad;
  if (threadIdx.x < kDim) to[threadIdx.x] = nan ? NAN : s.x[threadIdx.x];
  if (threadIdx.x >= 32) return;
  const float terms = size_of_terms(s.matrix, s.x, s.raw_mean);
  if (threadIdx.x != 0) return;
  p.solved_terms[record.number] = terms;
  solve.report(nan ? LLA_ROW_NAN : broken ? LLA_ROW_BREAKDOWN : LLA_ROW_OK);
}

}  // namespace lla::cuda::sm90::decode
