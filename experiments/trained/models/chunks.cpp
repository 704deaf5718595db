#include "models/chunks.hpp"

#include <limits>

#include "models/blocks.hpp"

namespace lla::trained {
namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

// The inverse without a gradient. Diagonal blocks of 16 by (I - L)(I + L^2)(I + L^4)(I + L^8), exact as L^16 = 0 and
// short enough not to grow; then pairs of blocks: inverse of [[A, 0], [C, B]] = [[A', 0], [-B' C A', B']].
at::Tensor inverse_by_blocks(const at::Tensor& lower) {
  constexpr int64_t base = 16;
  int64_t size = base;
  while (size < lower.size(-1)) size *= 2;
  const int64_t gap = size - lower.size(-1);
  const at::Tensor whole = gap > 0 ? at::constant_pad_nd(lower, {0, gap, 0, gap}) : lower.contiguous();
  const int64_t matrices = whole.numel() / (size * size);
  // Block (row, row + offset) of side s for all rows of that step: (matrices * count, s, s).
  const auto blocks = [&](const at::Tensor& from, int64_t side, int64_t step, int64_t down) {
    const int64_t count = size / step;
    return from.as_strided({matrices, count, side, side}, {size * size, step * (size + 1), size, 1}, down * size)
        .reshape({matrices * count, side, side});
  };
  const at::Tensor flat = whole.reshape({matrices, size, size});
  at::Tensor power = blocks(flat, base, base, 0);
  at::Tensor inverse = at::eye(base, lower.options()) - power;
  for (int64_t done = 2; done < base; done *= 2) {
    power = at::bmm(power, power);
    inverse = at::baddbmm(inverse, inverse, power);
  }
  for (int64_t side = base; side < size; side *= 2) {
    const int64_t pairs = size / (2 * side);
    const at::Tensor pair = inverse.view({matrices * pairs, 2, side, side});
    const at::Tensor upper = pair.select(1, 0), below = pair.select(1, 1);
    const at::Tensor corner = at::bmm(at::bmm(below, blocks(flat, side, 2 * side, side)), upper).neg_();
    inverse = at::cat({at::cat({upper, at::zeros_like(corner)}, 2), at::cat({corner, below}, 2)}, 1);
  }
  inverse = inverse.view(whole.sizes());
  return gap > 0 ? inverse.narrow(-1, 0, lower.size(-1)).narrow(-2, 0, lower.size(-1)) : inverse;
}

class UnitLowerInverse : public ::torch::autograd::Function<UnitLowerInverse> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& lower) {
    const at::Tensor inverse = inverse_by_blocks(lower);
    context->save_for_backward({inverse});
    return inverse;
  }
  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   const ::torch::autograd::variable_list& grads) {
    const at::Tensor transposed = context->get_saved_variables()[0].transpose(-1, -2);
    return {at::matmul(transposed, at::matmul(grads[0], transposed)).neg_().tril_(-1)};
  }
};

}  // namespace

Chunks make_chunks(int64_t length, int64_t preferred) {
  int64_t best = 0;
  for (int64_t size = preferred - preferred / 8; size <= preferred + preferred / 8; ++size) {
    if (length % size == 0 && (best == 0 || std::abs(size - preferred) < std::abs(best - preferred))) best = size;
  }
  if (length <= preferred) best = length;
  if (best == 0) best = preferred;
  return {length, best, (length + best - 1) / best};
}

at::Tensor to_chunks(const at::Tensor& x, const Chunks& chunks) {
  const bool scalars = x.dim() == 3;
  const at::Tensor wider = scalars ? x.unsqueeze(-1) : x;
  const at::Tensor padded =
      chunks.padding() > 0 ? at::constant_pad_nd(wider, {0, 0, 0, 0, 0, chunks.padding()}) : wider;
  const at::Tensor moved = padded.unflatten(1, {chunks.count, chunks.size}).permute({0, 3, 1, 2, 4});
  const at::Tensor flat = moved.reshape({-1, chunks.count, chunks.size, wider.size(3)});
  return scalars ? flat.squeeze(-1) : flat;
}

at::Tensor from_chunks(const at::Tensor& x, int64_t heads, const Chunks& chunks, int64_t rows) {
  const at::Tensor positions = x.flatten(1, 2).unflatten(0, {-1, heads});  // (N, H, positions, width)
  const int64_t before = chunks.length - rows - chunks.first(rows) * chunks.size;
  return positions.narrow(2, before, rows).transpose(1, 2);
}

at::Tensor cumulative(const at::Tensor& x) {
  const int64_t size = x.size(2);
  if (x.dim() == 3) return at::matmul(x, at::ones({size, size}, x.options()).triu());
  return at::matmul(at::ones({size, size}, x.options()).tril(), x);
}

at::Tensor decay_matrix(const at::Tensor& sums, at::ScalarType dtype, bool strict) {
  const int64_t size = sums.size(-1);
  const at::Tensor outside = at::full({size, size}, minus_infinity, sums.options()).triu(strict ? 0 : 1);
  return at::exp((sums.unsqueeze(-1) - sums.unsqueeze(-2)) + outside).to(dtype);
}

at::Tensor unit_lower_inverse(const at::Tensor& lower) { return UnitLowerInverse::apply(lower); }

DecayedSum::DecayedSum(const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay, int64_t first) {
  const int64_t count = k.size(1), size = k.size(2), asked = count - first;
  const auto dtype = k.scalar_type();
  k_ = k.narrow(1, first, asked);
  v_ = v.narrow(1, first, asked);
  at::Tensor sums;
  if (log_decay.defined()) {
    sums = cumulative(log_decay);
    const at::Tensor asked_sums = sums.narrow(1, first, asked);
    within_ = decay_matrix(asked_sums, dtype);
    entering_ = asked_sums.exp().to(dtype).unsqueeze(-1);
  } else {
    within_ = at::ones({size, size}, k.options()).tril();
  }
  if (count == 1) return;
  // The state before chunk c: what the chunks before it leave behind, each decayed by all chunks between.
  const int64_t earlier = count - 1;
  at::Tensor left = k.narrow(1, 0, earlier);
  at::Tensor between;
  if (log_decay.defined()) {
    const at::Tensor whole = sums.select(2, size - 1);  // (Z, n)
    left = left * (whole.unsqueeze(-1) - sums).narrow(1, 0, earlier).exp().to(dtype).unsqueeze(-1);
    const at::Tensor through = at::matmul(whole, at::ones({count, count}, whole.options()).triu());
    const at::Tensor before = (through - whole).narrow(1, first, asked);
    const at::Tensor not_earlier =
        at::full({count, count}, minus_infinity, whole.options()).triu().narrow(0, first, asked).narrow(1, 0, earlier);
    between = at::exp(before.unsqueeze(-1) - through.narrow(1, 0, earlier).unsqueeze(1) + not_earlier).to(dtype);
  } else {
    between = at::ones({count, count}, k.options()).tril(-1).narrow(0, first, asked).narrow(1, 0, earlier);
  }
  const at::Tensor added = at::matmul(left.transpose(2, 3), v.narrow(1, 0, earlier));  // (Z, n - 1, Dk, Dv)
  state_ = at::matmul(between, added.flatten(2)).unflatten(2, {k.size(3), v.size(3)});
}

at::Tensor DecayedSum::operator()(const at::Tensor& q) const {
  const at::Tensor inner = at::matmul(at::matmul(q, k_.transpose(2, 3)) * within_, v_);
  if (!state_.defined()) return inner;
  const at::Tensor outer = at::matmul(q, state_);
  return entering_.defined() ? at::addcmul(inner, outer, entering_) : inner + outer;
}

}  // namespace lla::trained
