// Operands and constants of the query rows: one kernel, bound by memory.
// A row that is not finite anywhere (in q, G, or in what the forward saved of it) gets zero operands and NaN constants:
// so its own gradients and those of the keys it sees become NaN, and nothing else does.
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/tensor/backward/query_rows.cuh"

namespace lla::cuda::tensor {
namespace {

constexpr int kThreads = kOperandThreads;

__device__ __forceinline__ uint4 pack_eight(const float (&v)[8]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 h = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    w[i] = *reinterpret_cast<const uint32_t*>(&h);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void write_scaled(uint16_t* to, const float (&v)[8], const PowerOfTwo& scale) {
  float scaled[8];
  for (int i = 0; i < 8; ++i) scaled[i] = scale * v[i];
  *reinterpret_cast<uint4*>(to) = pack_eight(scaled);
}

// v in two parts, both times `scale`.
__device__ __forceinline__ void in_two_parts(float (&high)[8], float (&low)[8], const float (&v)[8],
                                             const PowerOfTwo& scale) {
  for (int i = 0; i < 8; ++i) {
    const float scaled = scale * v[i];
    high[i] = __half2float(__float2half_rn(scaled));
    low[i] = scaled - high[i];
  }
}

__device__ __forceinline__ float dot(const float (&a)[8], const float (&b)[8]) {
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// The key pass brings whole tiles of rows: up to one of them lies behind a packed batch's last sequence, where no row
// is made. Their weights are zero, but zero times what the workspace happens to hold may be NaN.
template <int kPadded, bool kSolve>
__device__ __forceinline__ void zero_behind_last_sequence(const OperandParams& params, const BlockRows& block) {
  constexpr int kLanes = kPadded / 8;
  if (!params.shape.packed || block.batch != params.shape.batch - 1 || block.first != 0) return;
  const int32_t end = block.start_q + block.length_q, rows = min(kOperandRows, params.shape.total_q - end);
  for (int i = threadIdx.x; i < rows * kLanes; i += kThreads) {
    const int64_t to = (int64_t{block.head} * params.shape.total_q + end + i / kLanes) * kPadded + i % kLanes * 8;
    for (const int operand : {kOpQ, kOpG, kOpXHigh})
      *reinterpret_cast<uint4*>(params.operand[operand] + to) = make_uint4(0, 0, 0, 0);
    if constexpr (kSolve) *reinterpret_cast<uint4*>(params.operand[kOpYHigh] + to) = make_uint4(0, 0, 0, 0);
  }
}

// -x y of the row to where λ's gradient wants it; returns the row's sum in units of 2^row_unit, which are y's: its terms
// may be too large or too small for a float where the sum is not.
template <int kLanes>
__device__ __forceinline__ float ridge_row(const OperandParams& params, const BlockRows& block, int32_t position,
                                           bool here, bool bad, const float (&x)[8], const float (&y)[8], int row_unit,
                                           int column) {
  float sum = 0, each[8];
  for (int i = 0; i < 8; ++i) {
    each[i] = bad ? __int_as_float(0x7fffffff) : -x[i] * y[i];
    if (column < params.dim) sum += each[i];
  }
  sum = row_sum<kLanes>(sum);
  if (here && params.dridge != nullptr) {
    float* to = params.dridge + block.batch * params.dridge_batch +
                (block.start_q + position) * params.dridge_position + block.head * params.dridge_head;
    if (params.ridge == core::RidgeShape::dimension) {
      for (int i = 0; i < 8 && column < params.dim; ++i)
        to[(column + i) * params.dridge_dim] = PowerOfTwo(row_unit) * each[i];
    } else if (column == 0) {
      *to = PowerOfTwo(row_unit) * sum;
    }
  }
  return sum;
}

template <int kPadded, bool kSolve, RowKind kKind>
__global__ void __launch_bounds__(kThreads, 3) operands_kernel(const __grid_constant__ OperandParams params) {
  constexpr int kLanes = kPadded / 8, kSweeps = kOperandRows * kLanes / kThreads;
  __shared__ double sums[kOperandRows];
  const BlockRows block(params);
  const HeadStatistics& statistics = params.heads[block.copy_index];
  const int key_scale = exponent_above(power_of_two_scale(__uint_as_float(statistics.largest_key))) - 1;
  const int value_scale = exponent_above(power_of_two_scale(__uint_as_float(statistics.largest_value))) - 1;
  const HeadExponents head(params.bounds[block.copy_index], params.scale, key_scale, value_scale);
  if (threadIdx.x == 0 && block.first == 0 && block.head % params.shape.group == 0) {
    params.head_exponents[2 * block.copy_index] = -15 - head.rows;
    params.head_exponents[2 * block.copy_index + 1] = -15 - head.g;
  }
  zero_behind_last_sequence<kPadded, kSolve>(params, block);
  const int column = threadIdx.x % kLanes * 8;
  uint32_t low_sweeps = 0;  // those whose row of this thread has low parts
#pragma unroll 1
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    const int r = threadIdx.x / kLanes + sweep * (kThreads / kLanes);
    const int32_t position = block.first + r;
    const bool here = position < block.length_q;
    const int64_t at = block.row0 + position;
    PieceOf<kKind> from_q, from_g;
    std::conditional_t<kSolve, SavedPiece, PieceOf<kKind>> from_x;
    SavedPiece from_y, from_k;
    from_q.fetch(params.q, block, position, column, here && column < params.dim);
    from_g.fetch(params.g, block, position, column, here && column < params.value_dim);
    from_x.fetch(params.x, block, position, column, here && column < params.dim);
    if constexpr (kSolve) from_y.fetch(params.y, block, position, column, here && column < params.dim);
    from_k.fetch(params.mean_k, block, position, column, here && column < params.dim);
    RowSizes sizes{};
    float omega = 0, max = 0;
    if (here) sizes = params.sizes[at], omega = params.omega[at], max = params.max[at];
    bool bad = sizes.alpha == kBadRow;
    const bool zero = sizes.alpha == kZeroRow, none = bad || zero;
    const RowExponents exponents{
        0, 0, 0, 0, none ? kNoExponent : sizes.alpha, none ? kNoExponent : sizes.beta, none ? kNoExponent : sizes.both};
    const int alpha = head.row_alpha(exponents), beta = head.row_beta(exponents);
    const int both = head.row_both(exponents);
    const int row_unit = none ? 0 : sizes.row_unit;
    const int64_t to = at * kPadded + column;

    float q[8], g[8], x[8], y[8], mean[8];
    from_q.get(q, params.q), from_g.get(g, params.g), from_x.get(x, params.x), from_k.get(mean, params.mean_k);
    if constexpr (kSolve) from_y.get(y, params.y);
    if (kSolve && (statistics.marked & kShifted)) {  // saved statistics are of the keys as they are
      const float* const c = params.key_shift + block.copy_index * kPadded + column;
      float shift = 0;
      for (int i = 0; i < 8; ++i) shift = fmaf(q[i], c[i], shift), mean[i] -= here ? c[i] : 0.0f;
      shift = row_sum<kLanes>(shift) * (params.scale * kLog2E);
      max -= floorf(shift), omega *= exp2f(floorf(shift) - shift);
    }
    for (int i = 0; i < 8; ++i) {
      if (none) q[i] = g[i] = x[i] = y[i] = 0;
      if (!kSolve) y[i] = 0;
    }
    if (here) {
      write_scaled(params.operand[kOpQ] + to, q, PowerOfTwo(both + head.q));
      write_scaled(params.operand[kOpG] + to, g, PowerOfTwo(alpha + head.g));
    }
    // The means of E and F belong to what the products will see of x and y: without low parts, to the rounded ones. E
    // is a number, F is in the row's unit.
    float x_high[8], x_low[8], y_high[8], y_low[8];
    in_two_parts(x_high, x_low, x, PowerOfTwo(beta + head.rows));
    float e_mean = row_sum<kLanes>(dot(x, mean)), f_mean = 0;
    for (int i = 0; i < 8; ++i) mean[i] = PowerOfTwo(key_scale) * mean[i];  // from here on of the scaled keys
    const float e_low = PowerOfTwo(-(beta + head.rows + key_scale)) * row_sum<kLanes>(dot(x_low, mean));
    bool low = sizes.low > 0;
    if constexpr (kSolve) {
      const int y_exponent = row_unit + key_scale + alpha + head.rows;
      in_two_parts(y_high, y_low, y, PowerOfTwo(y_exponent));
      f_mean = row_sum<kLanes>(dot(y, mean));
      const float f_low = PowerOfTwo(-y_exponent) * row_sum<kLanes>(dot(y_low, mean));
      for (int i = 0; i < 8; ++i) y_high[i] = -y_high[i], y_low[i] = -y_low[i];  // the products subtract F
      low = !(row_sum<kLanes>(dot(x, q)) - e_mean >= sizes.low);
      if (!low) f_mean -= f_low;
    }
    if (!low) e_mean -= e_low;
    low_sweeps |= static_cast<uint32_t>(low && here) << sweep;
    bad |= !(finite(e_mean) && finite(f_mean));
    if (params.dridge != nullptr || params.ridge_sums != nullptr) {
      const int unit = row_unit + key_scale;
      const float sum = ridge_row<kLanes>(params, block, position, here, bad, x, y, unit, column);
      if (params.ridge_sums != nullptr && column == 0) sums[r] = here ? ldexp(static_cast<double>(sum), unit) : 0.0;
    }
    if (!here) continue;
    *reinterpret_cast<uint4*>(params.operand[kOpXHigh] + to) = pack_eight(x_high);
    if (low) *reinterpret_cast<uint4*>(params.operand[kOpXLow] + to) = pack_eight(x_low);
    if constexpr (kSolve) {
      *reinterpret_cast<uint4*>(params.operand[kOpYHigh] + to) = pack_eight(y_high);
      if (low) *reinterpret_cast<uint4*>(params.operand[kOpYLow] + to) = pack_eight(y_low);
    }
    if (column != 0) continue;
    const float nan = __int_as_float(0x7fffffff);
    RowConstants c;
    c.inverse = omega > 0 ? 1.f / omega : 0.f;
    c.inverse_ds = c.inverse * params.scale * power_of_two(alpha + beta - both - 1 - head.scale);
    c.logit = PowerOfTwo(-(both + head.q + key_scale)) * (params.scale * kLog2E);
    c.shift = 15.f - max;
    c.edge = power_of_two(-(alpha + beta + head.rows + key_scale));
    c.a0 = (1.f - e_mean) * power_of_two(-alpha);
    c.b0 = PowerOfTwo(row_unit - beta) * (f_mean - sizes.tau);
    c.minus_c = fminf(fmaxf(PowerOfTwo(row_unit - alpha - beta) * -sizes.c, -2.f), 2.f);
    if (zero) c = RowConstants{};
    if (bad) c.inverse = c.inverse_ds = 1.f, c.logit = c.shift = c.edge = 0.f, c.a0 = c.b0 = c.minus_c = nan;
    params.rows[at] = c;
    if (params.info.iterations != nullptr) params.info.iterations[at] = -1;
    if (params.info.residual != nullptr) params.info.residual[at] = -1;
    if (params.info.status != nullptr) params.info.status[at] = bad ? LLA_ROW_NAN : LLA_ROW_OK;
    RowUnits units;
    units.one = power_of_two(-alpha);
    // W is at most 2^15 and ω P, so with ω the bound of P |a b| is that of W |a b|, too.
    units.lift = kSolve ? power_of_two(larger(0, alpha + beta - both - exponent_above(omega))) : 1.0f;
    units.dx_exponent = beta;
    units.dq_exponent = kSolve ? row_unit + key_scale : alpha + beta + head.scale;  // with a solve, y's
    units.scale = PowerOfTwo(alpha + beta - units.dq_exponent) * params.scale;
    if (zero) units = RowUnits{};
    params.units[at] = units;
  }
  const bool any_low = __syncthreads_or(low_sweeps != 0);
  if (threadIdx.x == 0) params.low[blockIdx.x] = any_low;
  if (any_low) {  // then all its rows have some, if only zeros
#pragma unroll 1
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
      const int32_t position = block.first + threadIdx.x / kLanes + sweep * (kThreads / kLanes);
      if (position >= block.length_q || (low_sweeps >> sweep & 1)) continue;
      const int64_t to = (block.row0 + position) * kPadded + column;
      *reinterpret_cast<uint4*>(params.operand[kOpXLow] + to) = make_uint4(0, 0, 0, 0);
      if constexpr (kSolve) *reinterpret_cast<uint4*>(params.operand[kOpYLow] + to) = make_uint4(0, 0, 0, 0);
    }
  }
  if (params.ridge_sums != nullptr && threadIdx.x == 0) {
    double total = 0;
    for (const double s : sums) total += s;
    params.ridge_sums[blockIdx.x] = total;
  }
}

// One block per output number.
__global__ void __launch_bounds__(kThreads) ridge_sum_kernel(const __grid_constant__ RidgeSumParams params) {
  __shared__ double sums[kThreads];
  const int64_t first_head = params.per_head ? blockIdx.x : 0, heads = params.per_head ? 1 : params.heads_q;
  double sum = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    const double* from = params.partial + (b * params.heads_q + first_head) * params.blocks_per_head;
    for (int64_t i = threadIdx.x; i < heads * params.blocks_per_head; i += kThreads) sum += from[i];
  }
  sums[threadIdx.x] = sum;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) params.dridge[first_head * params.head_stride] = static_cast<float>(sums[0]);
}

template <int kPadded>
auto operands_kernel_of(bool solve, RowKind kind) {
  if (kind == RowKind::narrow) {
    return solve ? operands_kernel<kPadded, true, RowKind::narrow> : operands_kernel<kPadded, false, RowKind::narrow>;
  }
  if (kind == RowKind::wide) {
    return solve ? operands_kernel<kPadded, true, RowKind::wide> : operands_kernel<kPadded, false, RowKind::wide>;
  }
  return solve ? operands_kernel<kPadded, true, RowKind::any> : operands_kernel<kPadded, false, RowKind::any>;
}

}  // namespace

Status run_operands(const OperandParams& params, cudaStream_t stream) {
  const bool solve = params.y.data != nullptr;
  const RowKind kind = common_kind(params, solve);
  const auto kernel = params.padded == 64 ? operands_kernel_of<64>(solve, kind) : operands_kernel_of<128>(solve, kind);
  return launch(kernel, operand_blocks(params.shape), kThreads, 0, stream, "the operands of the backward pass", params);
}

Status run_ridge_sum(const RidgeSumParams& params, cudaStream_t stream) {
  return launch(ridge_sum_kernel, int64_t{params.per_head ? params.heads_q : 1}, kThreads, 0, stream,
                "the sum of the ridge's gradient", params);
}

}  // namespace lla::cuda::tensor
