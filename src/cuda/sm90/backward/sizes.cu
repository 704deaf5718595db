// Where x is given nobody has seen the rows yet: their sizes and each head's largest exponents, in a kernel of its own.
#include "cuda/common/runtime.hpp"
#include "cuda/sm90/backward/query_rows.cuh"

namespace lla::cuda::sm90 {
namespace {

template <int kPadded, bool kFast>
__global__ void __launch_bounds__(kOperandThreads) sizes_kernel(const __grid_constant__ OperandParams p) {
  constexpr int kLanes = kPadded / 8;
  const Place place(p);
  const HeadStatistics& head = p.heads[place.statistics];
  const float key_scale = power_of_two_scale(__uint_as_float(head.largest_key));
  const int key_norm = exponent_above(__uint_as_float(head.largest_norm) / key_scale);
  const int value_norm = value_norm_exponent(__uint_as_float(head.largest_value), p.value_dim);
  const int column = threadIdx.x % kLanes * 8;
  uint32_t most[kHeadBounds] = {};
  for (int r = threadIdx.x / kLanes; r < kOperandRows; r += kOperandThreads / kLanes) {
    const int32_t position = place.first + r;
    const bool here = position < place.length_q;
    const int64_t at = place.row0 + position;
    float omega = 0, max = 0;
    if (here) omega = p.omega[at], max = p.max[at];
    Eight<kFast, false> from_q, from_g, from_x;
    SavedEight from_k, from_v;
    from_q.fetch(p.q, place, position, column, here && column < p.dim);
    from_g.fetch(p.g, place, position, column, here && column < p.value_dim);
    from_x.fetch(p.x, place, position, column, here && column < p.dim);
    from_v.fetch(p.mean_v, place, position, column, here && column < p.value_dim);
    from_k.fetch(p.mean_k, place, position, column, here && column < p.dim && omega < 2);
    float q[8], g[8], x[8], mean_k[8], mean_v[8];
    from_q.get(q, p.q), from_g.get(g, p.g), from_x.get(x, p.x);
    from_k.get(mean_k, p.mean_k), from_v.get(mean_v, p.mean_v);
    float logit = 0, tau = 0;
    for (int i = 0; i < 8; ++i) {
      logit = fmaf(q[i], mean_k[i], logit);
      tau = fmaf(g[i], mean_v[i], tau);
    }
    logit = row_sum<kLanes>(logit) * p.scale * kLog2E;
    tau = row_sum<kLanes>(tau);
    const int rest = rest_exponent(rest_bound(exp2f(logit - max), omega));
    bool bad = !(all_finite(q) && all_finite(g) && all_finite(x) && finite(max) && finite(omega) && finite(tau));
    const uint32_t lanes = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
    bad = (__ballot_sync(0xffffffffu, bad) & lanes) != 0;
    const Size q_size = size_of<kLanes>(q), g_size = size_of<kLanes>(g), x_size = size_of<kLanes>(x);
    const RowExponents e = row_exponents(q_size.largest, g_size.largest, x_size.largest, kNoExponent, g_size.norm,
                                         x_size.norm, kNoExponent, key_norm, value_norm, rest);
    if (!here) continue;
    if (!bad) {
      uint32_t bounds[kHeadBounds];
      row_bounds(bounds, e);
      for (int f = 0; f < kHeadBounds; ++f) most[f] = ::max(most[f], bounds[f]);
    }
    // 16 bits fit fp16's mantissa: nothing is left over.
    if (column == 0) {
      p.sizes[at] = {bad ? kBadRow : static_cast<int16_t>(e.alpha), static_cast<int16_t>(e.beta), tau, 0.0f,
                     p.x.dtype == DType::f32 ? INFINITY : -INFINITY};
    }
  }
  raise_bounds(&p.bounds[place.statistics], most);
}

}  // namespace

Status run_sizes(const OperandParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(operand_blocks(params.shape));
  if (blocks == 0) return {};
  const bool fast = fast_rows(params.q, false) && fast_rows(params.g, false) && fast_rows(params.x, false);
  const auto kernel = params.padded == 64 ? (fast ? sizes_kernel<64, true> : sizes_kernel<64, false>)
                                          : (fast ? sizes_kernel<128, true> : sizes_kernel<128, false>);
  kernel<<<blocks, kOperandThreads, 0, stream>>>(params);
  return launched("the sizes of the backward's operands");
}

}  // namespace lla::cuda::sm90
