#include "data/degenerate.hpp"

#include <algorithm>

namespace lla::data {
namespace {

constexpr double kOutlier = 300;
constexpr double kShortKeys = 1e-4;
constexpr double kLongKeys = 100;
constexpr double kLongQueries = 30;

// A (batch, length, heads, width) tensor as the changes below see it: rows of one head, one after the other.
struct Rows {
  std::vector<double>& values;
  int64_t batch, length, heads, width;

  double* row(int64_t b, int64_t i, int64_t h) const { return values.data() + ((b * length + i) * heads + h) * width; }

  template <class Visit>
  void each(const Visit& visit) const {  // visit(b, i, h)
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t h = 0; h < heads; ++h) visit(b, i, h);
      }
    }
  }

  // Row i becomes the head's row i mod period.
  void repeat(int64_t period) const {
    each([&](int64_t b, int64_t i, int64_t h) { std::copy_n(row(b, i % period, h), width, row(b, i, h)); });
  }
  void multiply(double factor) const {
    for (double& value : values) value *= factor;
  }
  // The first and the last quarter of the rows become zero.
  void pad() const {
    each([&](int64_t b, int64_t i, int64_t h) {
      if (4 * i < length || 4 * i >= 3 * length) std::fill_n(row(b, i, h), width, 0.0);
    });
  }
  // One row in the middle becomes much longer than the others.
  void stretch_one() const {
    if (length == 0) return;
    each([&](int64_t b, int64_t i, int64_t h) {
      if (i != length / 3) return;
      for (double* value = row(b, i, h); value != row(b, i, h) + width; ++value) *value *= kOutlier;
    });
  }
};

// Queries c, keys c + d, c - d, c + d', c - d', ... with c along the first channel and every d orthogonal to it: all
// logits are equal and after each second key the mean key is the query.
void put_keys_around_queries(const Rows& q, const Rows& k) {
  q.each([&](int64_t b, int64_t i, int64_t h) {
    std::fill_n(q.row(b, i, h), q.width, 0.0);
    q.row(b, i, h)[0] = 1;
  });
  k.each([&](int64_t b, int64_t j, int64_t h) {
    double* const key = k.row(b, j, h);
    if (j % 2 == 1) {
      for (int64_t d = 0; d < k.width; ++d) key[d] = -k.row(b, j - 1, h)[d];
    }
    key[0] = 1;
  });
}

}  // namespace

void degrade(Kind kind, const Sizes& s, Tensors& tensors) {
  const Rows q{tensors.q, s.batch, s.length_q, s.heads_q, s.dim};
  const Rows k{tensors.k, s.batch, s.length_k, s.heads_kv, s.dim};
  const Rows v{tensors.v, s.batch, s.length_k, s.heads_kv, s.value_dim};
  switch (kind) {
    case Kind::equal_values: return v.repeat(1);
    case Kind::equal_keys: return k.repeat(1);
    case Kind::equal_pairs: return k.repeat(1), v.repeat(1);
    case Kind::one_token: return q.repeat(1), k.repeat(1), v.repeat(1);
    case Kind::two_tokens: return q.repeat(2), k.repeat(2), v.repeat(2);
    case Kind::zero_queries: return q.multiply(0);
    case Kind::zero_keys: return k.multiply(0);
    case Kind::zero_values: return v.multiply(0);
    case Kind::mean_query: return put_keys_around_queries(q, k);
    case Kind::one_large_value: return v.stretch_one();
    case Kind::one_large_key: return k.stretch_one();
    case Kind::short_keys: return k.multiply(kShortKeys);
    case Kind::long_keys: return k.multiply(kLongKeys);
    case Kind::long_queries: return q.multiply(kLongQueries);
    case Kind::padding: return q.pad(), k.pad(), v.pad();
    default: return;  // not one of these
  }
}

void perturb(std::vector<double>& values, uint64_t stream, double by) {
  constexpr uint64_t kSeed = 11;
  for (size_t i = 0; i < values.size(); ++i) values[i] *= 1 + by * (2 * uniform(kSeed, stream, i) - 1);
}

double rounding_of(DType dtype) { return dtype == DType::f64 ? 0x1p-48 : dtype == DType::f32 ? 0x1p-19 : 0x1p-17; }

}  // namespace lla::data
