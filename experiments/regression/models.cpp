#include "regression/models.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/gemm.hpp"

namespace lla::experiments {
namespace {

constexpr int kBlock = 32;  // positions taken together: products of 32 rows instead of rank-one updates

double squared_norm(const float* x, int d) {
  double sum = 0;
  for (int j = 0; j < d; ++j) sum += double(x[j]) * x[j];
  return sum;
}

// G = L D L' in place: unit lower L below the diagonal, D on it.
void factor(int n, double* g, int ld) {
  for (int j = 0; j < n; ++j) {
    for (int i = j + 1; i < n; ++i) {
      const double l = g[i * ld + j] / g[j * ld + j];
      for (int t = j + 1; t <= i; ++t) g[i * ld + t] -= l * g[t * ld + j];
    }
    for (int i = j + 1; i < n; ++i) g[i * ld + j] /= g[j * ld + j];
  }
}

// x <- L^-1 x for n rows of d.
void forward_substitute(int n, int d, const double* l, int ld, double* x) {
  for (int i = 1; i < n; ++i) gemm(1, d, i, -1.0, {l + i * ld, 0, 1}, x, d, 1.0, x + i * d, d);
}

}  // namespace

void squared_errors(int length, int d, const float* o, const float* target, double* out) {
  for (int i = 0; i < length; ++i) {
    double sum = 0;
    for (int j = 0; j < d; ++j) {
      const double e = double(o[i * d + j]) - target[i * d + j];
      sum += e * e;
    }
    out[i] = sum;
  }
}

void linear_errors(int length, int d, const Sequence& s, Errors out) {
  const size_t dim = d;
  std::vector<float> state(dim * dim, 0), o(kBlock * dim), kt(dim * kBlock), scores(kBlock * kBlock), self(kBlock);
  for (int first = 0; first < length; first += kBlock) {
    const int n = std::min(kBlock, length - first);
    const float* kb = s.k + first * dim;
    const float* vb = s.v + first * dim;
    const float* qb = s.q + first * dim;
    const float* target = s.target + first * dim;
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < d; ++j) kt[j * kBlock + i] = kb[i * dim + j];
    }
    gemm(n, n, d, 1.0f, {qb, dim, 1}, kt.data(), kBlock, 0.0f, scores.data(), kBlock);
    for (int i = 0; i < n; ++i) {
      self[i] = scores[i * kBlock + i];
      std::fill(scores.begin() + i * kBlock + i, scores.begin() + i * kBlock + n, 0.0f);
    }
    gemm(n, d, d, 1.0f, {qb, dim, 1}, state.data(), dim, 0.0f, o.data(), dim);
    gemm(n, d, n, 1.0f, {scores.data(), kBlock, 1}, vb, dim, 1.0f, o.data(), dim);
    gemm(d, d, n, 1.0f, {kb, 1, dim}, vb, dim, 1.0f, state.data(), dim);
    squared_errors(n, d, o.data(), target, out.strict + first);
    // Seeing itself adds (q.k) v to the output.
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < d; ++j) o[i * dim + j] += self[i] * vb[i * dim + j];
    }
    squared_errors(n, d, o.data(), target, out.inclusive + first);
  }
}

// Recursive least squares, a block of positions at a time. P = (sum k k' + ridge I)^-1 and W = (sum v k') P are those
// before the block; K, V are the block's rows. With U = K P, E = V - K W' and I + U K' = L D L', the one-step-ahead
// errors of all its positions are L^-1 E (innovations), and seeing itself divides the error of position i by D_i.
// Afterwards
//   P <- P - Y' D^-1 Y,   W' <- W' + Y' D^-1 (L^-1 E),   Y = L^-1 U.
// Exact algebra, the same as rank-one updates of the inverse one position at a time, without the rank-one memory
// traffic. Queries of their own ask the map as it is within the block: W'_i = W' + sum over j <= i of y_j e_j' / D_j.
void mesanet_errors(int length, int d, double ridge, const Sequence& s, Errors out) {
  const size_t dim = d;
  std::vector<double> p(dim * dim, 0), wt(dim * dim, 0);
  std::vector<double> kb(kBlock * dim), kt(dim * kBlock), u(kBlock * dim), e(kBlock * dim), scaled(kBlock * dim);
  std::vector<double> g(kBlock * kBlock), qb, o;
  const bool own_queries = s.q != s.k;
  if (own_queries) qb.resize(kBlock * dim), o.resize(kBlock * dim);
  for (int j = 0; j < d; ++j) p[j * dim + j] = 1 / ridge;
  for (int first = 0; first < length; first += kBlock) {
    const int n = std::min(kBlock, length - first);
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < d; ++j) {
        kb[i * dim + j] = kt[j * kBlock + i] = s.k[(first + i) * dim + j];
        e[i * dim + j] = s.v[(first + i) * dim + j];
      }
    }
    gemm(n, d, d, 1.0, {kb.data(), dim, 1}, p.data(), dim, 0.0, u.data(), dim);
    gemm(n, d, d, -1.0, {kb.data(), dim, 1}, wt.data(), dim, 1.0, e.data(), dim);
    gemm(n, n, d, 1.0, {u.data(), dim, 1}, kt.data(), kBlock, 0.0, g.data(), kBlock);
    for (int i = 0; i < n; ++i) g[i * kBlock + i] += 1;
    factor(n, g.data(), kBlock);
    forward_substitute(n, d, g.data(), kBlock, e.data());
    forward_substitute(n, d, g.data(), kBlock, u.data());
    for (int i = 0; i < n; ++i) {
      const double pivot = g[i * kBlock + i];
      double sum = 0;
      for (int j = 0; j < d; ++j) sum += e[i * dim + j] * e[i * dim + j];
      out.strict[first + i] = sum;
      out.inclusive[first + i] = sum / (pivot * pivot);
      for (int j = 0; j < d; ++j) scaled[i * dim + j] = u[i * dim + j] / pivot;
    }
    if (own_queries) {
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < d; ++j) {
          qb[i * dim + j] = s.q[(first + i) * dim + j];
          kt[j * kBlock + i] = scaled[i * dim + j];
        }
      }
      gemm(n, d, d, 1.0, {qb.data(), dim, 1}, wt.data(), dim, 0.0, o.data(), dim);
      gemm(n, n, d, 1.0, {qb.data(), dim, 1}, kt.data(), kBlock, 0.0, g.data(), kBlock);
      for (int i = 0; i < n; ++i) {
        double* row = o.data() + i * dim;
        const float* target = s.target + (first + i) * dim;
        const auto error = [&] {
          double sum = 0;
          for (int j = 0; j < d; ++j) sum += (row[j] - target[j]) * (row[j] - target[j]);
          return sum;
        };
        gemm(1, d, i, 1.0, {g.data() + i * kBlock, 0, 1}, e.data(), dim, 1.0, row, dim);
        out.strict[first + i] = error();
        for (int j = 0; j < d; ++j) row[j] += g[i * kBlock + i] * e[i * dim + j];
        out.inclusive[first + i] = error();
      }
    }
    gemm(d, d, n, -1.0, {scaled.data(), 1, dim}, u.data(), dim, 1.0, p.data(), dim);
    gemm(d, d, n, 1.0, {scaled.data(), 1, dim}, e.data(), dim, 1.0, wt.data(), dim);
  }
}

void random_errors(int length, int d, const Stream& draws, const Sequence& s, Errors out) {
  // A map with entries ~ N(0, 1) applied to q is |q| times a standard normal vector.
  std::vector<float> guess(static_cast<size_t>(length) * d);
  draws.normal(guess.data(), guess.size());
  for (int i = 0; i < length; ++i) {
    const float norm = static_cast<float>(std::sqrt(squared_norm(s.q + size_t(i) * d, d)));
    for (int j = 0; j < d; ++j) guess[size_t(i) * d + j] *= norm;
  }
  squared_errors(length, d, guess.data(), s.target, out.inclusive);
  std::copy(out.inclusive, out.inclusive + length, out.strict);
}

}  // namespace lla::experiments
