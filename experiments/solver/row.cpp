#include "solver/row.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lla::experiments {
namespace {

// Real is the type sums are kept in: double for fp64, float for everything else.
template <class Real>
class Row {
 public:
  using Vector = std::vector<Real>;

  Row(const Keys& keys, int64_t visible, const float* q, const RowOptions& options)
      : keys_(keys), n_(visible), d_(keys.d), q_(q, q + keys.d), o_(options), w_(n_), e_(n_) {
    weights();
    mean_k_ = combine(w_, keys_.k);
    mean_v_ = combine(w_, keys_.v);
    for (Real& m : mean_k_) m /= omega_;
    for (Real& m : mean_v_) m /= omega_;
  }

  RowResult run() {
    RowResult result;
    const Vector b = right_hand_side();
    const Vector x = conjugate_gradients(b, result);
    const Vector o = o_.form == Form::centered ? centered_output(x) : z_output(b, x);
    result.o.assign(o.begin(), o.end());
    return result;
  }

 private:
  Real operand(Real x, double bound) const { return static_cast<Real>(as_operand(o_.arithmetic, x, bound)); }
  static Real dot(const Vector& a, const Vector& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), Real{0});
  }
  static Real sum(const Vector& a) { return std::accumulate(a.begin(), a.end(), Real{0}); }

  // e_j = u · k_j for every visible key.
  void scores(const Vector& u) {
    std::fill(e_.begin(), e_.end(), Real{0});
    for (int64_t c = 0; c < d_; ++c) {
      const float* column = keys_.kt.data() + c * keys_.n;
      for (int64_t j = 0; j < n_; ++j) e_[j] += u[c] * static_cast<Real>(column[j]);
    }
  }

  // Σ u_j row_j over the visible rows of k or v.
  Vector combine(const Vector& u, const std::vector<float>& rows) const {
    Vector out(d_, Real{0});
    for (int64_t j = 0; j < n_; ++j) {
      for (int64_t c = 0; c < d_; ++c) out[c] += u[j] * static_cast<Real>(rows[j * d_ + c]);
    }
    return out;
  }

  // Weights relative to an integer bound of the largest logit, rounded once; the rounded ones are the weights
  // everywhere.
  void weights() {
    scores(q_);
    const Real unit = static_cast<Real>(o_.scale * 1.4426950408889634);
    const Real top = std::ceil(unit * *std::max_element(e_.begin(), e_.end()));
    for (int64_t j = 0; j < n_; ++j) w_[j] = operand(std::exp2(unit * e_[j] - top), 1);
    omega_ = sum(w_);
  }

  Vector right_hand_side() const {
    Vector b(d_);
    for (int64_t c = 0; c < d_; ++c) {
      b[c] = o_.form == Form::centered ? q_[c] - mean_k_[c] : omega_ * mean_k_[c] - omega_ * q_[c];
    }
    return b;
  }

  Vector apply(const Vector& u) {
    scores(u);
    const Real ridge = static_cast<Real>(o_.ridge);
    if (o_.form == Form::centered) {
      const Real mean = dot(u, mean_k_);
      const double bound = 2 * std::sqrt(double(dot(u, u)) * d_) * keys_.largest;
      for (int64_t j = 0; j < n_; ++j) e_[j] = operand(w_[j] * (e_[j] - mean), bound);
      Vector out = combine(e_, keys_.k);
      const Real excess = sum(e_);  // zero but for rounding
      for (int64_t c = 0; c < d_; ++c) out[c] = (out[c] - excess * mean_k_[c]) / omega_ + ridge * u[c];
      return out;
    }
    const double bound = std::sqrt(double(dot(u, u)) * d_) * keys_.largest;
    for (int64_t j = 0; j < n_; ++j) e_[j] = operand(w_[j] * e_[j], bound);
    Vector out = combine(e_, keys_.k);
    const Real qu = dot(q_, u), mu = omega_ * dot(mean_k_, u);
    for (int64_t c = 0; c < d_; ++c) {
      out[c] += -qu * omega_ * mean_k_[c] - mu * q_[c] + omega_ * qu * q_[c] + ridge * omega_ * u[c];
    }
    return out;
  }

  Vector conjugate_gradients(const Vector& b, RowResult& result) {
    Vector x(d_, Real{0}), r = b, p = b;
    const Real limit = static_cast<Real>(o_.tolerance * std::sqrt(double(dot(b, b))));
    Real rr = dot(r, r);
    while (!(result.converged = std::sqrt(rr) <= limit) && result.iterations < o_.max_iterations) {
      // The rounded direction is the direction.
      const double bound =
          std::abs(*std::max_element(p.begin(), p.end(), [](Real a, Real c) { return std::abs(a) < std::abs(c); }));
      for (Real& c : p) c = operand(c, bound);
      const Vector ap = apply(p);
      const Real curvature = dot(p, ap);
      if (!(curvature > 0)) break;
      const Real alpha = dot(r, p) / curvature;
      for (int64_t c = 0; c < d_; ++c) x[c] += alpha * p[c], r[c] -= alpha * ap[c];
      const Real next = dot(r, r), beta = next / rr;
      for (int64_t c = 0; c < d_; ++c) p[c] = r[c] + beta * p[c];
      rr = next;
      ++result.iterations;
    }
    return x;
  }

  Vector centered_output(const Vector& x) {
    scores(x);
    const Real mean = dot(x, mean_k_);
    const double bound = 2 * std::sqrt(double(dot(x, x)) * d_) * keys_.largest;
    for (int64_t j = 0; j < n_; ++j) e_[j] = operand(w_[j] * (e_[j] - mean), bound);
    Vector o = combine(e_, keys_.v);
    const Real excess = sum(e_);
    for (int64_t c = 0; c < d_; ++c) o[c] = mean_v_[c] + (o[c] - excess * mean_v_[c]) / omega_;
    return o;
  }

  Vector z_output(const Vector& mu, const Vector& rho) {
    scores(rho);
    const Real delta = omega_ - dot(mu, rho), qr = dot(q_, rho);
    Real largest = 0;
    for (int64_t j = 0; j < n_; ++j) {
      e_[j] = w_[j] * (1 - (e_[j] - qr)) / delta;
      largest = std::max(largest, std::abs(e_[j]));
    }
    for (Real& s : e_) s = operand(s, largest);
    return combine(e_, keys_.v);
  }

  const Keys& keys_;
  int64_t n_, d_;
  Vector q_;
  RowOptions o_;
  Vector w_, e_;
  Real omega_ = 0;
  Vector mean_k_, mean_v_;
};

}  // namespace

Keys::Keys(int64_t count, int64_t dim, std::vector<float> keys, std::vector<float> values)
    : n(count), d(dim), k(std::move(keys)), v(std::move(values)), kt(k.size()) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t c = 0; c < d; ++c) {
      kt[c * n + j] = k[j * d + c];
      largest = std::max(largest, std::abs(double(k[j * d + c])));
    }
  }
}

RowResult solve_row(const Keys& keys, int64_t visible, const float* q, const RowOptions& options) {
  return options.arithmetic == Arithmetic::f64 ? Row<double>(keys, visible, q, options).run()
                                               : Row<float>(keys, visible, q, options).run();
}

}  // namespace lla::experiments
