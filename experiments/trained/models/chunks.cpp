#include "models/chunks.hpp"

#include <algorithm>
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
  // Blocks of a side, one every `step` along the diagonal, `down` rows and `right` columns from it: a view.
  const auto blocks = [&](const at::Tensor& from, int64_t side, int64_t step, int64_t down, int64_t right) {
    return from.as_strided({matrices, size / step, side, side}, {size * size, step * (size + 1), size, 1},
                           down * size + right);
  };
  at::Tensor power = blocks(whole, base, base, 0, 0).reshape({-1, base, base});
  at::Tensor diagonal = at::eye(base, lower.options()) - power;
  for (int64_t done = 2; done < base; done *= 2) {
    power = at::bmm(power, power);
    diagonal = at::baddbmm(diagonal, diagonal, power);
  }
  const at::Tensor inverse = at::zeros_like(whole);
  blocks(inverse, base, base, 0, 0).copy_(diagonal.view({matrices, size / base, base, base}));
  for (int64_t side = base; side < size; side *= 2) {
    const int64_t step = 2 * side;
    const auto dense = [&](const at::Tensor& from, int64_t down, int64_t right) {
      return blocks(from, side, step, down, right).reshape({-1, side, side});
    };
    const at::Tensor corner = at::bmm(at::bmm(dense(inverse, side, side), dense(whole, side, 0)), dense(inverse, 0, 0));
    blocks(inverse, side, step, side, 0).copy_(corner.neg_().view({matrices, size / step, side, side}));
  }
  return gap > 0 ? inverse.narrow(-1, 0, lower.size(-1)).narrow(-2, 0, lower.size(-1)) : inverse;
}

// In the dtype of the gradient's other operands: what reaches it has their precision.
class UnitLowerInverse : public ::torch::autograd::Function<UnitLowerInverse> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& lower,
                            at::ScalarType precision) {
    const at::Tensor inverse = inverse_by_blocks(lower);
    context->save_for_backward({inverse.to(precision)});
    return inverse;
  }
  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   const ::torch::autograd::variable_list& grads) {
    const at::Tensor transposed = context->get_saved_variables()[0].transpose(-1, -2);
    const at::Tensor slope = at::matmul(grads[0].to(transposed.scalar_type()), transposed);
    return {at::matmul(transposed, slope).neg_().tril_(-1).to(grads[0].scalar_type()), at::Tensor()};
  }
};

// (N, L, H, width) to (N, H, L + padding, width) in one copy; the way back is a view.
class HeadsFirst : public ::torch::autograd::Function<HeadsFirst> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t padding) {
    const int64_t length = x.size(1);
    context->saved_data["length"] = length;
    at::Tensor out = at::empty({x.size(0), x.size(2), length + padding, x.size(3)}, x.options());
    out.narrow(2, 0, length).copy_(x.transpose(1, 2));
    if (padding > 0) out.narrow(2, length, padding).zero_();
    return out;
  }
  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   const ::torch::autograd::variable_list& grads) {
    return {grads[0].narrow(2, 0, context->saved_data["length"].toInt()).transpose(1, 2), at::Tensor()};
  }
};

// exp(sums_i - sums_j) below the diagonal (or on it too), zero elsewhere.
at::Tensor decays(const at::Tensor& sums, at::ScalarType dtype, bool strict) {
  const int64_t size = sums.size(-1);
  at::Tensor exponents = sums.unsqueeze(-1) - sums.unsqueeze(-2);
  exponents.add_(at::full({size, size}, minus_infinity, sums.options()).triu(strict ? 0 : 1));
  if (dtype == exponents.scalar_type()) return exponents.exp_();
  at::Tensor out = at::empty(exponents.sizes(), exponents.options().dtype(dtype));
  return at::exp_out(out, exponents);
}

// Of d, the gradient with respect to the exponents sums_i - sums_j: what reaches the sums.
at::Tensor to_sums(const at::Tensor& d, at::ScalarType dtype) {
  return d.sum(-1, false, dtype) - d.sum(-2, false, dtype);
}

class DecayedScores : public ::torch::autograd::Function<DecayedScores> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& scores,
                            const at::Tensor& sums, bool strict) {
    const at::Tensor decay = decays(sums, scores.scalar_type(), strict);
    const at::Tensor product = scores * decay;
    context->save_for_backward({decay, product});
    context->saved_data["dtype"] = static_cast<int64_t>(sums.scalar_type());
    return product;
  }
  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   const ::torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    return {grads[0] * saved[0], to_sums(grads[0] * saved[1], dtype), at::Tensor()};
  }
};

}  // namespace

Chunks make_chunks(int64_t length, int64_t preferred) {
  const auto chunks_of = [&](int64_t size) { return Chunks{length, size, (length + size - 1) / size}; };
  constexpr int64_t unit = 8;
  if (preferred < 2 * unit) return chunks_of(std::min(length, preferred));
  if (length <= preferred) return chunks_of((length + unit - 1) / unit * unit);
  Chunks best = chunks_of(preferred);
  for (int64_t size = preferred * 3 / 4 / unit * unit; size <= preferred * 9 / 8; size += unit) {
    const Chunks candidate = chunks_of(size);
    const int64_t gain = best.padding() - candidate.padding();
    if (gain > 0 || (gain == 0 && std::abs(size - preferred) < std::abs(best.size - preferred))) best = candidate;
  }
  return best;
}

at::Tensor to_chunks(const at::Tensor& x, const Chunks& chunks) {
  const bool scalars = x.dim() == 3;
  const at::Tensor moved = HeadsFirst::apply(scalars ? x.unsqueeze(-1) : x, chunks.padding());
  const at::Tensor flat = moved.view({-1, chunks.count, chunks.size, moved.size(3)});
  return scalars ? flat.squeeze(-1) : flat;
}

at::Tensor from_chunks(const at::Tensor& x, int64_t heads, const Chunks& chunks, int64_t rows) {
  const at::Tensor positions = x.flatten(1, 2).unflatten(0, {-1, heads});  // (N, H, positions, width)
  const int64_t before = chunks.length - rows - chunks.first(rows) * chunks.size;
  return positions.narrow(2, before, rows).transpose(1, 2);
}

at::Tensor chunks_from(const at::Tensor& x, int64_t first) {
  return first == 0 ? x : x.narrow(1, first, x.size(1) - first);
}

at::Tensor chunks_until(const at::Tensor& x, int64_t count) { return count == x.size(1) ? x : x.narrow(1, 0, count); }

at::Tensor cumulative(const at::Tensor& x) {
  const int64_t size = x.size(2);
  if (x.dim() == 3) return at::matmul(x, at::ones({size, size}, x.options()).triu());
  return at::matmul(at::ones({size, size}, x.options()).tril(), x);
}

at::Tensor decayed_scores(const at::Tensor& scores, const at::Tensor& sums, bool strict) {
  return DecayedScores::apply(scores, sums, strict);
}

at::Tensor unit_lower_inverse(const at::Tensor& lower, at::ScalarType precision) {
  return UnitLowerInverse::apply(lower, precision);
}

DecayedSum::DecayedSum(const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay, int64_t first) {
  const int64_t count = k.size(1), size = k.size(2), asked = count - first;
  const auto dtype = k.scalar_type();
  k_ = chunks_from(k, first);
  v_ = chunks_from(v, first);
  at::Tensor sums;
  if (log_decay.defined()) {
    sums = cumulative(log_decay);
    const at::Tensor asked_sums = chunks_from(sums, first);
    sums_ = asked_sums;
    entering_ = asked_sums.exp().to(dtype).unsqueeze(-1);
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
    const at::Tensor before = chunks_from(through - whole, first);
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
  const at::Tensor scores = at::matmul(q, k_.transpose(2, 3));
  const at::Tensor inner = at::matmul(sums_.defined() ? decayed_scores(scores, sums_) : scores.tril(), v_);
  if (!state_.defined()) return inner;
  const at::Tensor outer = at::matmul(q, state_);
  return entering_.defined() ? at::addcmul(inner, outer, entering_) : inner + outer;
}

}  // namespace lla::trained
