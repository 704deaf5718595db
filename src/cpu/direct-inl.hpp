// The direct solver: forms each row's matrix from its weights, in double, and factors it, a panel of doubles at a time.
//
// With z = (1, k - c) the weighted moments sum w z z^T hold omega, the first and the second moments; eliminating their
// first row and column leaves omega times the covariance. c is near the rows' mean keys, so that nothing cancels. For
// channel a the products (w z_a) z_b, b >= a, are one matrix product whose broadcast operand is the tile of z itself.
#if defined(LLA_CPU_DIRECT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef LLA_CPU_DIRECT_INL_HPP
#undef LLA_CPU_DIRECT_INL_HPP
#else
#define LLA_CPU_DIRECT_INL_HPP
#endif

#include "cpu/cg-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace lla::cpu {
namespace HWY_NAMESPACE {

constexpr int64_t kDirect = kPanel<double>;

// Row a of an upper triangle of size n, [column - a][lane].
HWY_INLINE double* triangle_row(double* matrix, int64_t n, int64_t a) {
  return matrix + (a * n - a * (a - 1) / 2) * kDirect;
}

// target[e] -= sum over i of factor[i] * source[i][e], for `entries` entries of a lane panel.
template <int kSources>
HWY_INLINE void subtract_rows(double* target, const double* const* sources, const double (*factors)[kDirect],
                              int64_t entries) {
  for (int64_t at = 0; at < kDirect; at += kLanes<double>) {
    Vec<double> f[kSources];
    for (int i = 0; i < kSources; ++i) f[i] = load(factors[i] + at);
    for (int64_t e = at; e < entries * kDirect; e += kDirect) {
      auto value = load(target + e);
      for (int i = 0; i < kSources; ++i) value = hn::NegMulAdd(f[i], load(sources[i] + e), value);
      store(value, target + e);
    }
  }
}

// Solves for `solution`, which holds what the factorisation has made of the right-hand side.
inline void back_substitute(double* matrix, int64_t n, const double* inverse, double* solution) {
  for (int64_t a = n - 1; a >= 0; --a) {
    const double* row = triangle_row(matrix, n, a);
    for (int64_t at = 0; at < kDirect; at += kLanes<double>) {
      auto value = load(solution + a * kDirect + at);
      for (int64_t b = a + 1; b < n; ++b) {
        value = hn::NegMulAdd(load(row + (b - a) * kDirect + at), load(solution + b * kDirect + at), value);
      }
      store(hn::Mul(value, load(inverse + a * kDirect + at)), solution + a * kDirect + at);
    }
  }
}

// Solves for another right-hand side, with the factors of the first.
inline void solve_again(double* matrix, int64_t n, const double* inverse, double* solution) {
  for (int64_t a = 0; a < n; ++a) {
    const double* row = triangle_row(matrix, n, a);
    for (int64_t at = 0; at < kDirect; at += kLanes<double>) {
      const auto value = hn::Mul(load(solution + a * kDirect + at), load(inverse + a * kDirect + at));
      for (int64_t b = a + 1; b < n; ++b) {
        double* const later = solution + b * kDirect + at;
        store(hn::NegMulAdd(load(row + (b - a) * kDirect + at), value, load(later)), later);
      }
    }
  }
  back_substitute(matrix, n, inverse, solution);
}

// Factors the upper triangle (n rows of n lanes) in place and solves for `solution`, which holds the right-hand side.
// A pivot below its share of `diagonal` drops its direction: that component of the solution is 0, and dropped[lane] is
// set. `inverse` becomes one over the pivots.
inline void factor_and_solve(double* matrix, int64_t n, const double* diagonal, double* solution, double* inverse,
                             bool* dropped) {
  constexpr int kPivots = 4;  // rows that update the rest together
  const auto row = [&](int64_t a) { return triangle_row(matrix, n, a); };
  // Early, small pivots multiply the rounding of later ones, so a vanishing pivot can be far from n roundings:
  // epsilon^(2/3).
  constexpr double smallest = 4e-11;
  HWY_ALIGN double factors[kPivots][kDirect];
  // Subtracts `count` eliminated rows, the first being `first`, from row b and its right-hand side.
  const auto eliminate = [&](int64_t first, int count, int64_t b) HWY_ATTR {
    const double* sources[kPivots];
    const double* rhs[kPivots];
    for (int i = 0; i < count; ++i) {
      sources[i] = row(first + i) + (b - first - i) * kDirect;
      rhs[i] = solution + (first + i) * kDirect;
      for (int64_t at = 0; at < kDirect; at += kLanes<double>) {
        store(hn::Mul(load(sources[i] + at), load(inverse + (first + i) * kDirect + at)), factors[i] + at);
      }
    }
    if (count == kPivots) {
      subtract_rows<kPivots>(row(b), sources, factors, n - b);
      subtract_rows<kPivots>(solution + b * kDirect, rhs, factors, 1);
      return;
    }
    for (int i = 0; i < count; ++i) {
      subtract_rows<1>(row(b), sources + i, factors + i, n - b);
      subtract_rows<1>(solution + b * kDirect, rhs + i, factors + i, 1);
    }
  };
  for (int64_t first = 0; first < n; first += kPivots) {
    const int64_t last = std::min<int64_t>(first + kPivots, n);
    for (int64_t a = first; a < last; ++a) {
      // Later pivots of the group see the earlier ones one at a time: their factors depend on each other.
      for (int64_t earlier = first; earlier < a; ++earlier) eliminate(earlier, 1, a);
      const double* pivot = row(a);
      for (int64_t l = 0; l < kDirect; ++l) {
        const bool keep = pivot[l] > smallest * diagonal[a * kDirect + l];
        inverse[a * kDirect + l] = keep ? 1.0 / pivot[l] : 0.0;
        dropped[l] |= !keep;
      }
    }
    for (int64_t b = last; b < n; ++b) eliminate(first, static_cast<int>(last - first), b);
  }
  back_substitute(matrix, n, inverse, solution);
}

// Moments of G.v - tau with z over the keys [lo, hi), whose weights and z are in place. t summed in float has roundings
// in directions the keys do not reach, where nothing but the ridge stands against them; among repeated tokens those are
// most directions. Summed here it stays within the span of the keys' differences, whatever G.v was rounded by.
template <class T>
void add_gamma_moments(PanelBlock<T>& block, Panel<T>& panel, int64_t lane, int64_t lo, int64_t hi) {
  const int64_t n = block.problem.dim + 1;
  const DirectMemory& m = block.memory.direct;
  T* const gamma = block.memory.tiles[2];
  centred_product(block.head.v.transposed, block.problem.value_dim, lo, hi, panel.value, *panel.tau,
                  block.memory.tiles[3], [&](int64_t j, Vec<T> g0, Vec<T> g1) HWY_ATTR {
                    store(g0, gamma + j * kPanel<T>);
                    store(g1, gamma + j * kPanel<T> + kLanes<T>);
                  });
  for (int64_t j = 0; j < hi - lo; ++j) {
    for (int64_t l = 0; l < kDirect; ++l) {
      m.weighted[j * kDirect + l] = m.weights[j * kDirect + l] * static_cast<double>(gamma[j * kPanel<T> + lane + l]);
    }
  }
  natural_product(m.keys, n, n, m.weighted, hi - lo, m.gamma);
}

// Moments of z over the keys [begin, end), for kDirect lanes of the panel from `lane` on.
template <class T>
void form_moments(PanelBlock<T>& block, Panel<T>& panel, int64_t lane, int64_t begin, int64_t end) {
  const int64_t dim = block.problem.dim, n = dim + 1;
  const DirectMemory& m = block.memory.direct;
  std::fill_n(m.matrix, DirectMemory::entries(dim) * kDirect, 0.0);
  std::fill_n(m.gamma, n * kDirect, 0.0);
  for (int64_t tile = begin / kTile; tile * kTile < end; ++tile) {
    const int64_t lo = std::max(panel.lo(tile), begin / kPackRows * kPackRows), hi = std::min(panel.hi(tile), end),
                  keys = hi - lo;
    const T* weights = weights_tile(panel, block.head.k.transposed, dim, lo, hi, block.memory.tiles[1]);
    for (int64_t j = 0; j < keys; ++j) {
      const T* key = block.head.k.natural + (lo + j) * dim;
      double* z = m.keys + j * n;
      z[0] = 1;
      for (int64_t c = 0; c < dim; ++c) z[c + 1] = static_cast<double>(key[c]) - m.centre[c];
      for (int64_t l = 0; l < kDirect; ++l)
        m.weights[j * kDirect + l] = static_cast<double>(weights[j * kPanel<T> + lane + l]);
    }
    for (int64_t a = 0; a < n; ++a) {
      for (int64_t j = 0; j < keys; ++j) {
        const auto z = splat(m.keys[j * n + a]);
        for (int64_t at = j * kDirect; at < (j + 1) * kDirect; at += kLanes<double>) {
          store(hn::Mul(z, load(m.weights + at)), m.weighted + at);
        }
      }
      natural_product(m.keys + a, n, n - a, m.weighted, keys, triangle_row(m.matrix, n, a));
    }
    if (panel.tau) add_gamma_moments(block, panel, lane, lo, hi);
  }
}

// Moments become A = covariance + ridge, [dim x dim] from row 1 of the triangle on; m.solution the right-hand side.
// Channels with an infinite ridge (preconditioner 0) become rows of the identity.
template <class T>
void finish_matrix(const Panel<T>& panel, const DirectMemory& m, int64_t dim, int64_t lane) {
  const double* first = m.matrix;
  double inverse_omega[kDirect];
  for (int64_t l = 0; l < kDirect; ++l) inverse_omega[l] = first[l] > 0 ? 1.0 / first[l] : 1.0;
  for (int64_t a = 0; a < dim; ++a) {
    double* row = triangle_row(m.matrix, dim + 1, a + 1);
    const int64_t at = a * kPanel<T> + lane;
    double mean[kDirect], is_free[kDirect], raw[kDirect];
    for (int64_t l = 0; l < kDirect; ++l) {
      is_free[l] = panel.preconditioner[at + l] > 0 ? 1.0 : 0.0;
      mean[l] = first[(a + 1) * kDirect + l] * inverse_omega[l];
      raw[l] = row[l] * inverse_omega[l];
    }
    for (int64_t b = a; b < dim; ++b) {
      double* entry = row + (b - a) * kDirect;
      const double* first_b = first + (b + 1) * kDirect;
      const T* free_b = panel.preconditioner + b * kPanel<T> + lane;
      for (int64_t l = 0; l < kDirect; ++l) {
        const double covariance = (entry[l] - mean[l] * first_b[l]) * inverse_omega[l];
        entry[l] = covariance * is_free[l] * (free_b[l] > 0 ? 1.0 : 0.0);
      }
    }
    for (int64_t l = 0; l < kDirect; ++l) {
      const double ridge = panel.ridge[at + l];
      row[l] = is_free[l] > 0 ? row[l] + ridge : 1.0;
      m.diagonal[a * kDirect + l] = is_free[l] > 0 ? raw[l] + ridge : 1.0;
      double rhs = static_cast<double>(panel.rhs[at + l]);
      if (panel.tau && panel.rhs_exponent[lane + l] != kNoExponent) {  // t once more
        const double* gamma = m.gamma + (a + 1) * kDirect + l;
        rhs = PowerOfTwo<double>(-panel.rhs_exponent[lane + l])((*gamma - mean[l] * m.gamma[l]) * inverse_omega[l]);
      }
      m.solution[a * kDirect + l] = is_free[l] > 0 ? rhs : 0.0;
    }
  }
}

// One step of refinement, for double. The moments are about a point that the panel's rows share, so that a row whose keys
// are far from it (one key with all the weight, hundreds of times as long as the others) has lost digits of its
// covariance that it needs beside a small ridge. A pass over the keys about the row's own mean knows them.
// panel.residual holds the right-hand sides of the lanes that are solved.
inline void refine(PanelBlock<double>& block, Panel<double>& panel, double* inverse) {
  const int64_t dim = block.problem.dim, end = dim * kDirect;
  const DirectMemory& m = block.memory.direct;
  bool running[kMaxPanels];
  for (int i = 0; i < block.count; ++i) running[i] = &block.panels[i] == &panel;
  std::copy_n(m.solution, end, panel.direction);
  apply_covariance(block, running);
  double* const correction = m.diagonal;
  for (int64_t e = 0; e < end; ++e) {
    const double left = (panel.residual[e] - panel.ridge[e] * m.solution[e]) - panel.image[e];
    correction[e] = panel.preconditioner[e] > 0 && std::isfinite(left) ? left : 0.0;
  }
  solve_again(triangle_row(m.matrix, dim + 1, 1), dim, inverse, correction);
  for (int64_t e = 0; e < end; ++e) m.solution[e] += correction[e];
}

// Whether rounding a solution of this square shows: it moves (k - mean).x, which stands beside 1, by about this much.
template <class T>
bool needs_low_part(double squares, T variance, int64_t dim) {
  return sizeof(T) == 4 &&
         std::sqrt(squares * static_cast<double>(variance) * static_cast<double>(dim)) * 0x1p-24 > 1e-5;
}

// Solves the lanes conjugate gradients left unfinished (all that have something to solve, if they did not run).
template <class T>
void solve_directly(PanelBlock<T>& block, Panel<T>& panel, CgLanes<T>& s) {
  const int64_t dim = block.problem.dim;
  const DirectMemory& m = block.memory.direct;
  if (std::any_of(s.lane, s.lane + kPanel<T>, [](Lane lane) { return lane != kDone; })) clear(panel.low, dim);
  for (int64_t lane = 0; lane < kPanel<T>; lane += kDirect) {
    int64_t begin = panel.end, end = panel.begin, wanted = 0;
    uint64_t pairs = 0;
    std::fill_n(m.centre, dim, 0.0);
    for (int64_t l = lane; l < lane + kDirect; ++l) {
      if (s.lane[l] == kDone) continue;
      ++wanted;
      begin = std::min(begin, panel.lane_begin[l]);
      end = std::max(end, panel.lane_end[l]);
      pairs += static_cast<uint64_t>(panel.lane_end[l] - panel.lane_begin[l]);
    }
    if (wanted == 0) continue;
    // Near the keys' mean, and the same whatever the other rows of the panel ask.
    constexpr int64_t kSample = 16;
    for (int64_t i = 0; i < kSample; ++i) {
      const int64_t j = panel.begin + (panel.end - panel.begin) * i / kSample;
      for (int64_t c = 0; c < dim; ++c) {
        m.centre[c] += static_cast<double>(block.head.k.natural[j * dim + c]) / kSample;
      }
    }
    form_moments(block, panel, lane, begin, end);
    finish_matrix(panel, m, dim, lane);
    bool dropped[kDirect] = {};
    HWY_ALIGN double inverse[kMaxChannels * kDirect];
    if constexpr (sizeof(T) == 8) {
      for (int64_t e = 0; e < dim * kDirect; ++e) {
        if (s.lane[e % kDirect] != kDone) panel.residual[e] = m.solution[e];
      }
    }
    factor_and_solve(triangle_row(m.matrix, dim + 1, 1), dim, m.diagonal, m.solution, inverse, dropped);
    if constexpr (sizeof(T) == 8) refine(block, panel, inverse);
    for (int64_t l = 0; l < kDirect; ++l) {
      if (s.lane[lane + l] == kDone) continue;
      s.lane[lane + l] = kDone;
      panel.status[lane + l] = dropped[l] ? LLA_ROW_BREAKDOWN : LLA_ROW_OK;
      panel.iterations[lane + l] = -1;
      panel.relative_residual[lane + l] = -1;
      double squares = 0;
      for (int64_t c = 0; c < dim; ++c) {
        const double value = m.solution[c * kDirect + l];
        const int64_t at = c * kPanel<T> + lane + l;
        panel.solution[at] = static_cast<T>(value);
        panel.residual[at] = 0;
        squares += value * value;
      }
      panel.low_lanes[lane + l] =
          needs_low_part<T>(squares / panel.row_unit_squares[lane + l], panel.variance[lane + l], dim);
      for (int64_t c = 0; c < dim && panel.low_lanes[lane + l]; ++c) {
        const int64_t at = c * kPanel<T> + lane + l;
        panel.low[at] = static_cast<T>(m.solution[c * kDirect + l] - static_cast<double>(panel.solution[at]));
      }
    }
    block.work.direct_flops += 2 * pairs * static_cast<uint64_t>(DirectMemory::entries(dim));
    block.work.direct_rows += static_cast<uint64_t>(wanted);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lla::cpu
HWY_AFTER_NAMESPACE();
#endif
