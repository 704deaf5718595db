// Two kernels, both bound by memory: the largest exponents of every head, then operands and constants.
// A row that is not finite anywhere (in q, G, or in what the forward saved of it) gets zero operands and NaN constants:
// so its own gradients and those of the keys it sees become NaN, and nothing else does.
#include "cuda/common/runtime.hpp"
#include "cuda/sm90/backward/exponents.hpp"
#include "cuda/sm90/backward/operands.hpp"
#include "cuda/sm90/backward/store.cuh"
#include "cuda/sm90/rows.cuh"

namespace lla::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr float kLog2E = 1.44269504088896340736f;

// The head and rows of a block.
struct Place {
  int32_t batch, head, key_head, statistics;
  int32_t first, length_q, start_q;
  int64_t row0;  // saved row of position 0 of the sequence

  __device__ __forceinline__ explicit Place(const OperandParams& p) {
    const Shape& s = p.shape;
    const int32_t chunks = (s.seqlen_q + kOperandRows - 1) / kOperandRows;
    const int32_t pair = blockIdx.x / chunks;
    first = (blockIdx.x - pair * chunks) * kOperandRows;
    batch = pair / s.heads_q;
    head = pair - batch * s.heads_q;
    key_head = head / s.group;
    statistics = s.packed ? key_head : batch * p.heads_kv + key_head;
    start_q = s.packed ? p.cu_q[batch] : 0;
    length_q = s.packed ? p.cu_q[batch + 1] - start_q : s.seqlen_q;
    row0 = s.packed ? int64_t{head} * s.total_q + start_q : (int64_t{batch} * s.heads_q + head) * s.seqlen_q;
  }
};

// Eight elements of a row, zeros beyond its end or where there is no tensor.
__device__ __forceinline__ void load(float (&to)[8], const Rows& rows, const Place& place, int32_t position, int column,
                                     int dim) {
#pragma unroll
  for (float& v : to) v = 0;
  if (rows.data == nullptr || column >= dim) return;
  const void* row = row_pointer(rows, place.batch, place.start_q + position, place.head);
  load_eight(to, row, column, rows);
}

template <int kLanes>
__device__ __forceinline__ float row_sum(float x) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}
template <int kLanes>
__device__ __forceinline__ float row_max(float x) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

__device__ __forceinline__ float largest_of(const float (&v)[8]) {
  float m = 0;
  for (float x : v) m = fmaxf(m, fabsf(x));
  return m;
}

__device__ __forceinline__ bool all_finite(const float (&v)[8]) {
  bool ok = true;
  for (float x : v) ok &= finite(x);
  return ok;
}

struct Size {
  int largest, norm;  // exponents above the largest element and the norm
};

template <int kLanes>
__device__ __forceinline__ Size size_of(const float (&v)[8]) {
  const float largest = row_max<kLanes>(largest_of(v));
  const int e = exponent_above(largest);
  const float down = power_of_two(-e);  // keeps the squares in range
  float squares = 0;
  for (float x : v) squares += (x * down) * (x * down);
  squares = row_sum<kLanes>(squares);
  return {e, plus(e, exponent_above(sqrtf(squares) * 1.0001f))};
}

struct RowData {
  float q[8], g[8], x[8], y[8];
  RowExponents exponents;
  bool bad;  // the same in all lanes of the row
};

// Reads a row and what its exponents need. All lanes of the warp come here.
template <int kLanes>
__device__ __forceinline__ void read_row(RowData& r, const OperandParams& p, const Place& place, int32_t position,
                                         bool here, int column) {
  if (here) {
    load(r.q, p.q, place, position, column, p.dim);
    load(r.g, p.g, place, position, column, p.value_dim);
    load(r.x, p.x, place, position, column, p.dim);
    load(r.y, p.y, place, position, column, p.dim);
  } else {
    for (int i = 0; i < 8; ++i) r.q[i] = r.g[i] = r.x[i] = r.y[i] = 0;
  }
  r.bad = !(all_finite(r.q) && all_finite(r.g) && all_finite(r.x) && all_finite(r.y));
  int rest = 0;
  float omega = 0, max = 0;
  if (here) {
    const int64_t row = place.row0 + position;
    omega = p.omega[row], max = p.max[row];
    r.bad |= !(finite(max) && finite(omega) && (p.c == nullptr || finite(p.c[row])));
    if (p.rest != nullptr) rest = rest_exponent(p.rest[row]);
  }
  if (p.rest == nullptr) {  // the same for all rows, so every lane takes part in the sum
    float mean[8], logit = 0;
    load(mean, p.mean_k, place, here ? position : place.first, here && omega < 2 ? column : kLanes * 8, p.dim);
    for (int i = 0; i < 8; ++i) logit = fmaf(r.q[i], mean[i], logit);
    logit = row_sum<kLanes>(logit) * p.scale * kLog2E;
    rest = rest_exponent(rest_bound(exp2f(logit - max), omega));
  }
  const uint32_t lanes = (kLanes == 32 ? 0xffffffffu : ((1u << kLanes) - 1)) << (threadIdx.x % 32 / kLanes * kLanes);
  r.bad = (__ballot_sync(0xffffffffu, r.bad) & lanes) != 0;
  if (r.bad) {
    for (int i = 0; i < 8; ++i) r.q[i] = r.g[i] = r.x[i] = r.y[i] = 0;
  }
  const HeadStatistics& head = p.heads[place.statistics];
  const float key_scale = power_of_two_scale(__uint_as_float(head.largest_key));
  const int key_norm = exponent_above(__uint_as_float(head.largest_norm) / key_scale);
  // |v| <= largest sqrt(dim): half the exponent of the dimension, rounded up.
  const int value_norm = plus(exponent_above(__uint_as_float(head.largest_value)), (33 - __clz(p.value_dim)) / 2);
  const Size q = size_of<kLanes>(r.q), g = size_of<kLanes>(r.g), x = size_of<kLanes>(r.x), y = size_of<kLanes>(r.y);
  r.exponents =
      row_exponents(q.largest, g.largest, x.largest, y.largest, g.norm, x.norm, y.norm, key_norm, value_norm, rest);
}

template <int kPadded>
__global__ void __launch_bounds__(kThreads) bounds_kernel(const __grid_constant__ OperandParams p) {
  constexpr int kLanes = kPadded / 8;
  constexpr int kFields = sizeof(HeadBounds) / 4;
  __shared__ uint32_t shared[kFields];
  if (threadIdx.x < kFields) shared[threadIdx.x] = 0;
  __syncthreads();
  const Place place(p);
  uint32_t most[kFields] = {};
  const auto note = [&](int field, int exponent) {
    if (exponent > kNoExponent) most[field] = max(most[field], static_cast<uint32_t>(exponent + kExponentBias));
  };
  for (int r = threadIdx.x / kLanes; r < kOperandRows; r += kThreads / kLanes) {
    const int32_t position = place.first + r;
    const bool here = position < place.length_q;
    RowData row;
    read_row<kLanes>(row, p, place, position, here, threadIdx.x % kLanes * 8);
    if (!here || row.bad) continue;
    const RowExponents& e = row.exponents;
    note(0, e.q), note(1, e.g), note(2, e.x), note(3, e.y);
    note(4, e.alpha), note(5, e.beta);
    note(6, plus(e.g, e.alpha)), note(7, plus(e.y, e.alpha)), note(8, plus(e.x, e.beta));
    note(9, plus(plus(e.q, e.alpha), e.beta));
  }
#pragma unroll
  for (int f = 0; f < kFields; ++f) {
    const uint32_t m = __reduce_max_sync(0xffffffffu, most[f]);
    if (threadIdx.x % 32 == 0 && m > 0) atomicMax(&shared[f], m);
  }
  __syncthreads();
  if (threadIdx.x < kFields && shared[threadIdx.x] > 0) {
    atomicMax(reinterpret_cast<uint32_t*>(&p.bounds[place.statistics]) + threadIdx.x, shared[threadIdx.x]);
  }
}

__device__ __forceinline__ uint4 pack_eight(const float (&v)[8]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 h = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    w[i] = *reinterpret_cast<const uint32_t*>(&h);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void write_scaled(uint16_t* to, const float (&v)[8], float scale) {
  float scaled[8];
  for (int i = 0; i < 8; ++i) scaled[i] = v[i] * scale;
  *reinterpret_cast<uint4*>(to) = pack_eight(scaled);
}

// High part to one operand, what it leaves to the other.
__device__ __forceinline__ void write_split(uint16_t* high, uint16_t* low, const float (&v)[8], float scale) {
  float h[8], l[8];
  for (int i = 0; i < 8; ++i) {
    h[i] = __half2float(__float2half_rn(v[i] * scale));
    l[i] = v[i] * scale - h[i];
  }
  *reinterpret_cast<uint4*>(high) = pack_eight(h);
  *reinterpret_cast<uint4*>(low) = pack_eight(l);
}

// -x y of the row to where λ's gradient wants it; returns the row's sum.
template <int kLanes>
__device__ __forceinline__ float ridge_row(const OperandParams& p, const Place& place, int32_t position, bool here,
                                           bool bad, const float (&x)[8], const float (&y)[8], int column) {
  float sum = 0, each[8];
  for (int i = 0; i < 8; ++i) {
    each[i] = bad ? __int_as_float(0x7fffffff) : -x[i] * y[i];
    if (column < p.dim) sum += each[i];
  }
  sum = row_sum<kLanes>(sum);
  if (!here) return 0;
  float* to = p.dridge + place.batch * p.dridge_batch + (place.start_q + position) * p.dridge_position +
              place.head * p.dridge_head;
  if (p.ridge == core::RidgeShape::dimension) {
    for (int i = 0; i < 8 && column < p.dim; ++i) to[(column + i) * p.dridge_dim] = each[i];
  } else if (p.ridge == core::RidgeShape::token && column == 0) {
    *to = sum;
  }
  return sum;
}

template <int kPadded>
__global__ void __launch_bounds__(kThreads, 3) operands_kernel(const __grid_constant__ OperandParams p) {
  constexpr int kLanes = kPadded / 8;
  __shared__ float sums[kOperandRows];
  const Place place(p);
  const HeadStatistics& statistics = p.heads[place.statistics];
  const int key_scale = exponent_above(power_of_two_scale(__uint_as_float(statistics.largest_key))) - 1;
  const int value_scale = exponent_above(power_of_two_scale(__uint_as_float(statistics.largest_value))) - 1;
  const HeadExponents head(p.bounds[place.statistics], p.scale, key_scale, value_scale);
  if (threadIdx.x == 0 && place.first == 0 && place.head % p.shape.group == 0) {
    p.head_scales[2 * place.statistics] = power_of_two(-15 - head.rows);
    p.head_scales[2 * place.statistics + 1] = power_of_two(-15 - head.g);
  }
  const int column = threadIdx.x % kLanes * 8;
  for (int r = threadIdx.x / kLanes; r < kOperandRows; r += kThreads / kLanes) {
    const int32_t position = place.first + r;
    const bool here = position < place.length_q;
    RowData row;
    read_row<kLanes>(row, p, place, position, here, column);
    float mean_k[8], mean_v[8];
    load(mean_k, p.mean_k, place, here ? position : place.first, here ? column : kPadded, p.dim);
    load(mean_v, p.mean_v, place, here ? position : place.first, here ? column : kPadded, p.value_dim);
    float tau = 0, e_mean = 0, f_mean = 0;
    for (int i = 0; i < 8; ++i) {
      tau = fmaf(row.g[i], mean_v[i], tau);
      e_mean = fmaf(row.x[i], mean_k[i], e_mean);
      f_mean = fmaf(row.y[i], mean_k[i], f_mean);
    }
    tau = row_sum<kLanes>(tau), e_mean = row_sum<kLanes>(e_mean), f_mean = row_sum<kLanes>(f_mean);
    row.bad |= !(finite(tau) && finite(e_mean) && finite(f_mean));
    if (p.dridge != nullptr) {
      const float sum = ridge_row<kLanes>(p, place, position, here, row.bad, row.x, row.y, column);
      if (column == 0) sums[r] = sum;
    }
    if (!here) continue;
    const int64_t at = place.row0 + position;
    const int alpha = head.row_alpha(row.exponents), beta = head.row_beta(row.exponents);
    const int alpha_beta = head.row_alpha_beta(row.exponents);
    const int64_t to = at * kPadded + column;
    write_scaled(p.operand[kOpQ] + to, row.q, power_of_two(alpha_beta + head.q));
    write_scaled(p.operand[kOpG] + to, row.g, power_of_two(alpha + head.g));
    if (p.x.data != nullptr)
      write_split(p.operand[kOpXHigh] + to, p.operand[kOpXLow] + to, row.x, power_of_two(beta + head.rows));
    if (p.y.data != nullptr)
      write_split(p.operand[kOpYHigh] + to, p.operand[kOpYLow] + to, row.y, -power_of_two(alpha + head.rows));
    if (column != 0) continue;
    const float omega = p.omega[at];
    const float nan = __int_as_float(0x7fffffff);
    RowConstants c;
    c.inverse = omega > 0 ? 1.f / omega : 0.f;
    c.inverse_ds = c.inverse * p.scale * power_of_two(alpha + beta - alpha_beta - 1 - head.scale);
    c.logit = p.scale * kLog2E * power_of_two(-(alpha_beta + head.q + key_scale));
    c.shift = 15.f - p.max[at];
    c.edge = power_of_two(-(alpha + beta + head.rows + key_scale));
    c.a0 = (1.f - e_mean) * power_of_two(-alpha);
    c.b0 = (f_mean - tau) * power_of_two(-beta);
    c.minus_c = p.c == nullptr ? 0.f : fminf(fmaxf(-p.c[at] * power_of_two(-(alpha + beta)), -2.f), 2.f);
    if (row.bad) c.inverse = c.inverse_ds = 1.f, c.logit = c.shift = c.edge = 0.f, c.a0 = c.b0 = c.minus_c = nan;
    p.rows[at] = c;
    if (p.info.iterations != nullptr) p.info.iterations[at] = -1;
    if (p.info.residual != nullptr) p.info.residual[at] = -1;
    if (p.info.status != nullptr) p.info.status[at] = row.bad ? LLA_ROW_NAN : LLA_ROW_OK;
    p.row_scales[2 * at] = power_of_two(alpha + beta);
    p.row_scales[2 * at + 1] = power_of_two(beta);
  }
  if (p.dridge != nullptr && (p.ridge == core::RidgeShape::scalar || p.ridge == core::RidgeShape::head)) {
    __syncthreads();
    if (threadIdx.x == 0) {
      float total = 0;
      for (float s : sums) total += s;
      p.dridge[blockIdx.x] = total;
    }
  }
}

// One block per output number.
__global__ void __launch_bounds__(kThreads) ridge_sum_kernel(const __grid_constant__ RidgeSumParams p) {
  __shared__ double sums[kThreads];
  const int64_t first_head = p.per_head ? blockIdx.x : 0, heads = p.per_head ? 1 : p.heads_q;
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const float* from = p.partial + (b * p.heads_q + first_head) * p.blocks_per_head;
    for (int64_t i = threadIdx.x; i < heads * p.blocks_per_head; i += kThreads) sum += from[i];
  }
  sums[threadIdx.x] = sum;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) p.dridge[first_head * p.head_stride] = static_cast<float>(sums[0]);
}

template <int kPadded>
Status run(const OperandParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(operand_blocks(params.shape));
  bounds_kernel<kPadded><<<blocks, kThreads, 0, stream>>>(params);
  operands_kernel<kPadded><<<blocks, kThreads, 0, stream>>>(params);
  return launched("the operands of the backward pass");
}

}  // namespace

Status run_operands(const OperandParams& params, cudaStream_t stream) {
  if (operand_blocks(params.shape) == 0) return {};
  return params.padded == 64 ? run<64>(params, stream) : run<128>(params, stream);
}

Status run_ridge_sum(const RidgeSumParams& params, cudaStream_t stream) {
  ridge_sum_kernel<<<params.per_head ? params.heads_q : 1, kThreads, 0, stream>>>(params);
  return launched("the sum of the ridge's gradient");
}

}  // namespace lla::cuda::sm90
