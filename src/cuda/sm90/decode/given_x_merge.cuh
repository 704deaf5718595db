// With x given: what a part leaves behind of a row, and the kernel that puts the parts of a row together.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/sm90/decode/doubt.cuh"
#include "cuda/sm90/decode/walk.cuh"

namespace lla::cuda::sm90::decode {

// A part's sums of one row: head, then Σ w v and Σ w (e - centre) v.
struct GivenXHead {
  float max, omega, omega_e, centre;  // max in log2 units; omega_e = Σ w (e - centre)
  int32_t invalid;
  float value;  // the largest |v| of some keys; of two passes
};
// Puts the parts of a row of a bundle together: a thread a column. kBundle: rows whose sums lie together.
template <int kDim, int kBundle>
__device__ __forceinline__ void merge_row(const Params& p, int bundle, int i_row) {
  const RowRecord record = row_of(p, p.records[bundle], i_row);
  const int parts = record.last - record.first + 1, j = threadIdx.x;
  const auto part_of = [&](int i) {
    return p.partials + int64_t{bundle + record.first + i} * kBundle * given_x_row_floats(kDim) +
           i_row * given_x_row_floats(kDim);
  };
  const auto head = [&](int i) -> const GivenXHead& { return *reinterpret_cast<const GivenXHead*>(part_of(i)); };
  float top = -INFINITY;
  bool invalid = record.invalid;
  float reference = 0, value = 0;
#pragma unroll 4
  for (int i = 0; i < parts; ++i) {
    const GivenXHead h = head(i);
    if (h.max > top) top = h.max, reference = h.centre;
    invalid |= h.invalid != 0;
    value = fmaxf(value, h.value);
  }
  float plain = 0, with_e = 0, omega = 0, omega_e = 0;
#pragma unroll 4
  for (int i = 0; i < parts; ++i) {
    const GivenXHead h = head(i);
    const float* const sums = part_of(i) + kGivenXHead;
    const float a = sums[j], b = sums[kDim + j];
    const float factor = h.max > -INFINITY ? exp2_fast(h.max - top) : h.omega;  // 0, or NaN
    const float by = h.centre - reference;
    plain = fmaf(factor, a, plain), with_e = fmaf(factor, fmaf(by, a, b), with_e);
    omega = fmaf(factor, h.omega, omega), omega_e = fmaf(factor, fmaf(by, h.omega, h.omega_e), omega_e);
  }
  const float mean = plain / omega;
  float o = mean + fmaf(-omega_e, mean, with_e) / omega;
  if (omega == 0) o = 0;
  const bool bad = __syncthreads_or(!(fabsf(o) <= 3e38f) && j < p.value_dim);
  if (invalid || bad) o = NAN;
  if (j < p.value_dim) {
    store_as(p.o.data, p.o.dtype, row_offset(p.o, record.batch, record.position, record.head) + j * p.o.stride[3], o);
  }
  const bool outgrown = __syncthreads_or(fabsf(o) >= least_infinite(p.o.dtype) && j < p.value_dim);
  bool doubtful = false;
  if (p.solved_x) {
    const float least = kOfTwoPasses * least_output(p.solved_terms[record.number], value);
    doubtful = !__syncthreads_or(fabsf(o) >= least && j < p.value_dim);
  }
  if (j != 0) return;
  if (invalid || bad) {
    report_row(p, record, invalid ? LLA_ROW_INVALID : LLA_ROW_NAN);
  } else if (outgrown || doubtful) {
    report_row(p, record, LLA_ROW_BREAKDOWN);
  } else if (!p.solved_x) {  // otherwise the solve has said it
    report_row(p, record, LLA_ROW_OK);
  }
}

// At most `rows_of_bundle` rows of a bundle are there, by the host's bound. A sequence that claims more rows than it
// may have is not usable, and says so in all of them. As many blocks at a time as there are threads for: the kernel
// waits for memory.
template <int kDim, int kBundle>
__global__ void __launch_bounds__(kDim, 2048 / kDim)
    given_x_merge_kernel(const __grid_constant__ Params p, int rows_of_bundle) {
  wait_for_last_kernel();
  let_next_kernel_begin();
  const int bundle = blockIdx.x / rows_of_bundle;
  if (bundle >= *p.live_rows) return;
#pragma unroll 1
  for (int i = blockIdx.x % rows_of_bundle; i < p.records[bundle].rows; i += rows_of_bundle) {
    merge_row<kDim, kBundle>(p, bundle, i);
  }
}

}  // namespace lla::cuda::sm90::decode
