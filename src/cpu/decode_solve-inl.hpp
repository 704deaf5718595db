// Decoding: what is done once a row, in double: the spans' sums become one, the matrix is factored, its solution
// judged.
#if defined(LLA_CPU_DECODE_SOLVE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_DECODE_SOLVE_INL_HPP
#undef LLA_CPU_DECODE_SOLVE_INL_HPP
#else
#define LLA_CPU_DECODE_SOLVE_INL_HPP
#endif

#include "cpu/cost.hpp"
#include "cpu/decode-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

// Calls visit(sums of a span, 4^(its max - the row's)) in the order of the spans.
template <class T, class Visit>
HWY_INLINE void for_spans(const DecodeUnit<T>& unit, int64_t i, double max, const Visit& visit) {
  for (int64_t span = 0; span < unit.spans; ++span) {
    const SpanSums& sums = unit.sums[span * kDecodeRows + i];
    if (const double factor = rescale(sums.max, max); factor != 0) visit(sums, factor);
  }
}

template <class T>
double largest_max(const DecodeUnit<T>& unit, int64_t i) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t span = 0; span < unit.spans; ++span) {
    const double of_span = unit.sums[span * kDecodeRows + i].max;
    max = of_span > max || std::isnan(of_span) ? of_span : max;
  }
  return max;
}

HWY_INLINE void add_scaled(double factor, const double* from, int64_t count, double* to) {
  const auto f = splat(factor);
  int64_t e = 0;
  for (; e + kLanes<double> <= count; e += kLanes<double>) store(hn::MulAdd(f, load(from + e), load(to + e)), to + e);
  for (; e < count; ++e) to[e] = std::fma(factor, from[e], to[e]);
}

// One piece of the matrix, summed over the spans.
template <class T>
void merge_piece(DecodeUnit<T>& unit, int64_t i, int64_t piece) {
  const DecodeSizes size = sizes_of<T>(unit.call->problem.dim, unit.call->problem.value_dim);
  const int64_t first = size.entries * piece / kDecodePieces / kLanes<double> * kLanes<double>;
  const int64_t next = size.entries * (piece + 1) / kDecodePieces / kLanes<double> * kLanes<double>;
  const int64_t last = piece + 1 == kDecodePieces ? size.entries : next;
  double* const to = unit.row[i].matrix;
  std::fill(to + first, to + last, 0.0);
  for_spans(unit, i, largest_max(unit, i), [&](const SpanSums& sums, double factor) HWY_ATTR {
    add_scaled(factor, sums.matrix + first, last - first, to + first);
  });
}

// Factors the upper triangle of the row's matrix in place: factor[a][b] = pivot_a times the unit factor. A pivot below
// `smallest` of its diagonal is dropped: its inverse is 0. Returns whether one was.
template <class T>
bool factor_matrix(DecodeRow<T>& row, int64_t dim, double smallest) {
  constexpr int64_t kPivots = 4;  // rows that update the rest together
  double* const factor = row.factor;
  bool dropped = false;
  const auto subtract = [&](int64_t first, int64_t count, int64_t b) HWY_ATTR {
    const double* source[kPivots];
    Vec<double> f[kPivots];
    double scalar[kPivots];
    for (int64_t i = 0; i < kPivots; ++i) {
      source[i] = factor + (first + std::min(i, count - 1)) * dim;
      scalar[i] = i < count ? source[i][b] * row.inverse[first + i] : 0.0;
      f[i] = splat(scalar[i]);
    }
    double* const to = factor + b * dim;
    int64_t c = b;
    for (; c + kLanes<double> <= dim; c += kLanes<double>) {
      auto value = load(to + c);
      for (int64_t i = 0; i < kPivots; ++i) value = hn::NegMulAdd(f[i], load(source[i] + c), value);
      store(value, to + c);
    }
    for (; c < dim; ++c) {
      for (int64_t i = 0; i < kPivots; ++i) to[c] = std::fma(-scalar[i], source[i][c], to[c]);
    }
  };
  for (int64_t first = 0; first < dim; first += kPivots) {
    const int64_t last = std::min(first + kPivots, dim);
    for (int64_t a = first; a < last; ++a) {
      for (int64_t earlier = first; earlier < a; ++earlier) subtract(earlier, 1, a);
      const double pivot = factor[a * dim + a];
      const bool keep = pivot > smallest * row.diagonal[a];
      row.inverse[a] = keep ? 1.0 / pivot : 0.0;
      dropped |= !keep;
    }
    for (int64_t b = last; b < dim; ++b) subtract(first, last - first, b);
  }
  return dropped;
}

// x = A^-1 x with the factored matrix.
template <class T>
void solve_factored(const DecodeRow<T>& row, int64_t dim, double* x) {
  for (int64_t a = 0; a < dim; ++a) {
    add_scaled(-x[a] * row.inverse[a], row.factor + a * dim + a + 1, dim - a - 1, x + a + 1);
  }
  for (int64_t a = dim - 1; a >= 0; --a) {
    double sum = x[a];
    for (int64_t b = a + 1; b < dim; ++b) sum -= row.factor[a * dim + b] * x[b];
    x[a] = sum * row.inverse[a];
  }
}

// The row's x in T, and what its products with the keys are centred by.
template <class T>
void set_vector(DecodeRow<T>& row, int64_t dim) {
  row.centre = 0;
  for (int64_t c = 0; c < dim; ++c) {
    row.vector[c] = static_cast<T>(row.solution[c]);
    row.centre += static_cast<double>(row.vector[c]) * row.mean_k[c];
  }
}

// A pivot this far below its diagonal is rounding (as in direct-inl.hpp); of sums in float, a reason to sum in double.
template <class T>
constexpr double kSmallestPivot = sizeof(T) == 8 ? 4e-11 : 1e-5;

template <class T>
void solve_row(DecodeUnit<T>& unit, int64_t i) {
  const core::Problem& p = unit.call->problem;
  DecodeRow<T>& row = unit.row[i];
  if (row.state != DecodeState::solving) return;
  row.max = largest_max(unit, i);
  row.omega = row.omega_squares = 0;
  std::fill_n(row.mean_k, p.dim, 0.0);
  for_spans(unit, i, row.max, [&](const SpanSums& sums, double factor) HWY_ATTR {
    row.omega += factor * sums.omega;
    row.omega_squares += factor * factor * sums.omega_squares;
    add_scaled(factor, sums.keys, p.dim, row.mean_k);
  });
  for (int64_t span = 0; span < unit.spans; ++span) row.bad |= unit.sums[span * kDecodeRows + i].bad;
  if (row.bad || !(row.omega > 0) || !std::isfinite(row.omega)) {  // no weight: logits beyond the contract
    row.bad = true;
    row.state = DecodeState::idle;
    return;
  }
  const double inverse_omega = 1 / row.omega;
  for (int64_t c = 0; c < p.dim; ++c) row.mean_k[c] *= inverse_omega;
  const DecodeSizes size = sizes_of<T>(p.dim, p.value_dim);
  for_triangle<T>(p.dim, size.key_stride, [&](int64_t first_row, int64_t column, int64_t vectors, int64_t at) {
    for (int64_t a = first_row; a < std::min<int64_t>(first_row + kTriangleRows, p.dim); ++a) {
      const double* const from = row.matrix + at + (a - first_row) * vectors * kLanes<T> - column;
      for (int64_t b = std::max(column, a); b < std::min(column + vectors * kLanes<T>, p.dim); ++b) {
        row.factor[a * p.dim + b] = from[b] * inverse_omega - row.mean_k[a] * row.mean_k[b];
      }
      if (a >= column && a < column + vectors * kLanes<T>) row.diagonal[a] = from[a] * inverse_omega;
    }
  });
  // The ridge; a channel with an infinite one becomes a row of the identity.
  double smallest_ridge = std::numeric_limits<double>::infinity(), curvature = 0;
  for (int64_t a = 0; a < p.dim; ++a) {
    const double ridge = row.ridge[a];
    smallest_ridge = std::min(smallest_ridge, ridge);
    const bool fixed = std::isinf(ridge);
    for (int64_t b = a; b < p.dim; ++b) {
      if (fixed || std::isinf(row.ridge[b])) row.factor[a * p.dim + b] = 0;
    }
    curvature = std::max(curvature, row.factor[a * p.dim + a]);
    row.factor[a * p.dim + a] = fixed ? 1.0 : row.factor[a * p.dim + a] + ridge;
    row.diagonal[a] = fixed ? 1.0 : row.diagonal[a] + ridge;
    row.rhs[a] =
        fixed ? 0.0 : row.query_as_given[a] - (unit.shifted ? static_cast<double>(unit.shift[a]) : 0.0) - row.mean_k[a];
    row.solution[a] = row.rhs[a];
  }
  const bool dropped = factor_matrix(row, p.dim, kSmallestPivot<T>);
  if (dropped) row.status = LLA_ROW_BREAKDOWN;
  const double effective_keys = row.omega * row.omega / row.omega_squares;
  if (sizeof(T) == 4 && (dropped || too_ill_conditioned(smallest_ridge, curvature, effective_keys, p.dim))) {
    row.state = DecodeState::failed;
    return;
  }
  solve_factored(row, p.dim, row.solution);
  const double largest = sizeof(T) == 8 ? std::sqrt(std::numeric_limits<double>::max()) / 1024
                                        : std::sqrt(std::numeric_limits<float>::max()) / 1024;
  for (int64_t c = 0; c < p.dim; ++c) {
    if (std::abs(row.solution[c]) < largest) continue;
    if (sizeof(T) == 4) {
      row.state = DecodeState::failed;
      return;
    }
    row.status = LLA_ROW_BREAKDOWN;  // a ridge so small that x leaves the range of the type: the row goes without one
    std::fill_n(row.solution, p.dim, 0.0);
    break;
  }
  row.refinements = 0;
  set_vector(row, p.dim);
}

// Whether the solution holds on the keys themselves; else solves for what is left, or gives the row up to double.
template <class T>
bool holds(DecodeUnit<T>& unit, int64_t i) {
  if (sizeof(T) == 8) return true;
  const core::Problem& p = unit.call->problem;
  DecodeRow<T>& row = unit.row[i];
  double residual[kMaxChannels], image[kMaxChannels] = {}, coefficients = 0;
  for_spans(unit, i, row.max, [&](const SpanSums& sums, double) HWY_ATTR {  // these sums are in the row's unit already
    coefficients += sums.coefficients;
    add_scaled(1.0, sums.image, p.dim, image);
  });
  core::SolveSizes sizes;
  double squares = 0;
  sizes.smallest_ridge = std::numeric_limits<double>::infinity();
  for (int64_t c = 0; c < p.dim; ++c) {
    const double x = static_cast<double>(row.vector[c]), ridge = row.ridge[c];
    residual[c] = 0;
    if (std::isinf(ridge)) continue;
    residual[c] = row.rhs[c] - (image[c] - coefficients * row.mean_k[c]) / row.omega - ridge * x;
    squares += residual[c] * residual[c];
    sizes.rhs_squares += row.rhs[c] * row.rhs[c];
    sizes.rhs_product += x * row.rhs[c];
    sizes.ridge_product += x * ridge * x;
    sizes.ridge_squares += ridge * x * ridge * x;
    sizes.smallest_ridge = std::min(sizes.smallest_ridge, ridge);
  }
  // A direct solve is held to a quarter of what conjugate gradients may leave.
  const double limit = core::forward_stop_rule(p.tolerance / 4, p.dim).limit(sizes, row.end - row.begin);
  // (k - mean) . x in float is off by 2^-24 of its centre: too much where that is far above what x makes of the keys.
  const double spread = std::sqrt(1 + std::max(0.0, sizes.rhs_product - sizes.ridge_product));
  const bool exact = std::abs(row.centre) <= 256 * spread;
  if (exact && squares <= limit) return true;
  const bool falls = row.refinements == 0 || 4 * squares <= row.residual_squares;
  if (!exact || !falls || row.refinements == 3 || !std::isfinite(squares)) {
    row.state = DecodeState::failed;
    return false;
  }
  ++row.refinements;
  row.residual_squares = squares;
  solve_factored(row, p.dim, residual);
  for (int64_t c = 0; c < p.dim; ++c) row.solution[c] = static_cast<double>(row.vector[c]) + residual[c];
  set_vector(row, p.dim);
  return false;
}

// With x given there is nothing to try, but float may not do where the products with x are far from 0.
template <class T>
bool precise_enough(DecodeUnit<T>& unit, int64_t i) {
  DecodeRow<T>& row = unit.row[i];
  row.max = largest_max(unit, i);
  row.omega = row.centre = 0;
  for_spans(unit, i, row.max, [&](const SpanSums& sums, double factor) HWY_ATTR {
    row.omega += factor * sums.omega;
    row.centre += factor * sums.coefficients;
  });
  for (int64_t span = 0; span < unit.spans; ++span) row.bad |= unit.sums[span * kDecodeRows + i].bad;
  if (row.bad || !(row.omega > 0) || !std::isfinite(row.omega)) {
    row.bad = true;
    row.state = DecodeState::idle;
    return false;
  }
  row.centre /= row.omega;
  if (sizeof(T) == 4 && !(std::abs(row.centre) <= 16)) {
    row.state = DecodeState::failed;
    return false;
  }
  return true;
}

// The row's output from the spans' sums, if its solution holds.
template <class T>
bool output_of_row(DecodeUnit<T>& unit, int64_t i, double* output) {
  const core::Problem& p = unit.call->problem;
  DecodeRow<T>& row = unit.row[i];
  const bool given = p.given_x();
  if (!(given ? precise_enough(unit, i) : holds(unit, i))) return false;
  double values[kMaxChannels] = {}, steered[kMaxChannels] = {}, coefficients = 0;
  for_spans(unit, i, row.max, [&](const SpanSums& sums, double factor) HWY_ATTR {
    const double scale = given ? factor : 1.0;
    coefficients += scale * sums.coefficients;
    add_scaled(scale, sums.values, p.value_dim, values);
    add_scaled(scale, sums.steered, p.value_dim, steered);
  });
  for (int64_t span = 0; span < unit.spans; ++span) row.bad |= unit.sums[span * kDecodeRows + i].bad;
  for (int64_t c = 0; c < p.value_dim; ++c) {
    const double mean = values[c] / row.omega;
    output[c] = mean + (steered[c] - coefficients * mean) / row.omega;
  }
  row.state = DecodeState::done;
  return true;
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
