// Where x is given nobody has seen the rows yet: their sizes and each head's largest exponents, in a kernel of its own.
#include "cuda/common/launch.cuh"
#include "cuda/tensor/backward/query_rows.cuh"

namespace lla::cuda::tensor {
namespace {

// The largest exponent field of eight numbers, 1 for subnormal ones, 0 for zeros. 255: not all are finite.
__device__ __forceinline__ uint32_t exponent_field(const float (&v)[8]) {
  uint32_t bits = 0;
#pragma unroll
  for (const float x : v) bits = max(bits, __float_as_uint(x) & 0x7fffffffu);
  return bits == 0 ? 0 : max(bits >> 23, 1u);
}
__device__ __forceinline__ int exponent_of_field(uint32_t field) {
  return field == 0 ? kNoExponent : static_cast<int>(field) - 126;
}

template <int kLanes>
__device__ __forceinline__ int norm_exponent(const float (&v)[8], int largest) {
  const float down = power_of_two(-largest);  // keeps the squares in range
  float squares = 0;
#pragma unroll
  for (const float x : v) squares = fmaf(x * down, x * down, squares);
  return plus(largest, exponent_above(sqrtf(row_sum<kLanes>(squares)) * 1.0001f));
}

template <int kPadded, RowKind kKind>
__global__ void __launch_bounds__(kOperandThreads, kKind == RowKind::narrow ? 4 : 3)
    sizes_kernel(const __grid_constant__ OperandParams params) {
  constexpr int kLanes = kPadded / 8;
  const BlockRows block(params);
  const HeadStatistics& head = params.heads[block.copy_index];
  const float key_scale = power_of_two_scale(__uint_as_float(head.largest_key));
  const int key_norm = exponent_above(__uint_as_float(head.largest_norm) / key_scale);
  const int value_norm = value_norm_exponent(__uint_as_float(head.largest_value), params.value_dim);
  const float value_scale = power_of_two_scale(__uint_as_float(head.largest_value));
  const int value_exponent = exponent_above(value_scale) - 1;
  const int column = threadIdx.x % kLanes * 8;
  uint32_t most[kHeadBounds] = {};
  for (int r = threadIdx.x / kLanes; r < kOperandRows; r += kOperandThreads / kLanes) {
    const int32_t position = block.first + r;
    const bool here = position < block.length_q;
    const int64_t at = block.row0 + position;
    float omega = 0, max = 0;
    PieceOf<kKind> from_q, from_g, from_x;
    SavedPiece from_v;
    from_q.fetch(params.q, block, position, column, here && column < params.dim);
    from_g.fetch(params.g, block, position, column, here && column < params.value_dim);
    from_x.fetch(params.x, block, position, column, here && column < params.dim);
    from_v.fetch(params.mean_v, block, position, column, here && column < params.value_dim);
    if (here) omega = params.omega[at], max = params.max[at];
    float q[8], g[8], x[8], mean_v[8];
    from_q.get(q, params.q), from_g.get(g, params.g), from_x.get(x, params.x), from_v.get(mean_v, params.mean_v);
    int rest = 0;
    if (__any_sync(0xffffffffu, here && omega < 2)) {  // a row may have one heavy key
      SavedPiece from_k;
      float mean_k[8], logit = 0;
      from_k.fetch(params.mean_k, block, position, column, here && column < params.dim && omega < 2);
      from_k.get(mean_k, params.mean_k);
      for (int i = 0; i < 8; ++i) logit = fmaf(q[i], mean_k[i], logit);
      logit = row_sum<kLanes>(logit) * params.scale * kLog2E;
      rest = rest_exponent(rest_bound(exp2f(logit - max), omega));
    }
    uint32_t fields = exponent_field(q) | exponent_field(g) << 8 | exponent_field(x) << 16;
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      fields = __vmaxu4(fields, __shfl_xor_sync(0xffffffffu, fields, mask));
    }
    const uint32_t of_q = fields & 255, of_g = fields >> 8 & 255, of_x = fields >> 16;
    const int g_largest = exponent_of_field(of_g), x_largest = exponent_of_field(of_x);
    const int row_unit = of_g == 0 ? 0 : g_largest - value_exponent;
    const PowerOfTwo g_scale(of_g == 0 ? 0 : -g_largest);
    float tau = 0;
    for (int i = 0; i < 8; ++i) tau = fmaf(g_scale * g[i], mean_v[i] * value_scale, tau);
    tau = row_sum<kLanes>(tau);
    const bool bad = of_q == 255 || of_g == 255 || of_x == 255 || !(finite(max) && finite(omega) && finite(tau));
    const bool zero = !bad && of_g == 0;
    const int g_norm = norm_exponent<kLanes>(g, g_largest), x_norm = norm_exponent<kLanes>(x, x_largest);
    const RowExponents e = row_exponents(exponent_of_field(of_q), g_largest, x_largest, kNoExponent, g_norm, x_norm,
                                         kNoExponent, key_norm, value_norm, rest, kNoEnergy);
    if (!here) continue;
    if (!bad && !zero) {
      uint32_t bounds[kHeadBounds];
      row_bounds(bounds, e);
      for (int f = 0; f < kHeadBounds; ++f) most[f] = ::max(most[f], bounds[f]);
    }
    // 16 bits fit fp16's mantissa: nothing is left over.
    if (column == 0) {
      params.sizes[at] = {bad    ? kBadRow
                          : zero ? kZeroRow
                                 : static_cast<int16_t>(e.alpha),
                          static_cast<int16_t>(e.beta),
                          static_cast<int16_t>(e.both),
                          static_cast<int16_t>(row_unit),
                          tau,
                          0.0f,
                          !zero && params.x.dtype == DType::f32 ? INFINITY : -INFINITY};
    }
  }
  raise_bounds(&params.bounds[block.copy_index], most);
}

template <int kPadded>
auto sizes_kernel_of(RowKind kind) {
  return kind == RowKind::narrow ? sizes_kernel<kPadded, RowKind::narrow>
         : kind == RowKind::wide ? sizes_kernel<kPadded, RowKind::wide>
                                 : sizes_kernel<kPadded, RowKind::any>;
}

}  // namespace

Status run_sizes(const OperandParams& params, cudaStream_t stream) {
  const RowKind kind = common_kind(params, false);
  const auto kernel = params.padded == 64 ? sizes_kernel_of<64>(kind) : sizes_kernel_of<128>(kind);
  return launch(kernel, operand_blocks(params.shape), kOperandThreads, 0, stream,
                "the sizes of the backward's operands", params);
}

}  // namespace lla::cuda::tensor
