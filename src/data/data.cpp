#include "data/data.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "data/degenerate.hpp"
#include "data/peaked.hpp"

namespace lla::data {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
constexpr int64_t kSegment = 128;
constexpr int64_t kCentres = 16;

// The finaliser of splitmix64.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// What the random numbers of a head are for; each purpose has its own stream.
enum class Purpose : uint64_t { query, key, value, centre, choice_query, choice_key, mean, map };

// The numbers of one head and purpose.
struct Stream {
  uint64_t seed;
  uint64_t id;
  Stream(uint64_t seed, int64_t head, Purpose purpose)
      : seed(seed), id(static_cast<uint64_t>(head) * 8 + static_cast<uint64_t>(purpose)) {}
  double normal(int64_t index) const { return data::normal(seed, id, static_cast<uint64_t>(index)); }
  double uniform(int64_t index) const { return data::uniform(seed, id, static_cast<uint64_t>(index)); }
};

using Matrix = std::vector<double>;  // (length, width) of one head

Matrix normals(const Stream& stream, int64_t length, int64_t width) {
  Matrix m(static_cast<size_t>(length * width));
  for (size_t i = 0; i < m.size(); ++i) m[i] = stream.normal(static_cast<int64_t>(i));
  return m;
}

void scale_dimensions(Matrix& m, int64_t width) {
  Matrix scale(static_cast<size_t>(width));
  double squares = 0;
  for (size_t i = 0; i < scale.size(); ++i) {
    scale[i] = 1 / std::sqrt(static_cast<double>(i + 1));
    squares += scale[i] * scale[i];
  }
  const double rms = std::sqrt(squares / static_cast<double>(width));
  for (size_t i = 0; i < m.size(); ++i) m[i] *= scale[i % scale.size()] / rms;
}

// Each row becomes its own random centre + 0.3 of itself, then of rms 1.
void gather_around_centres(Matrix& m, int64_t width, const Matrix& centres, const Stream& choice) {
  const int64_t length = static_cast<int64_t>(m.size()) / width;
  for (int64_t i = 0; i < length; ++i) {
    const auto centre = static_cast<int64_t>(choice.uniform(i) * static_cast<double>(kCentres));
    double squares = 0;
    for (int64_t d = 0; d < width; ++d) {
      double& value = m[static_cast<size_t>(i * width + d)];
      value = centres[static_cast<size_t>(centre * width + d)] + 0.3 * value;
      squares += value * value;
    }
    const double rms = std::sqrt(squares / static_cast<double>(width));
    for (int64_t d = 0; d < width; ++d) m[static_cast<size_t>(i * width + d)] /= rms;
  }
}

// The first coordinates of a segment's keys take the signs of the segment's number, lowest bit first: disjoint cones.
void put_into_cones(Matrix& keys, int64_t width) {
  const int64_t length = static_cast<int64_t>(keys.size()) / width;
  const int64_t segments = (length + kSegment - 1) / kSegment;
  int64_t bits = 0;
  while ((int64_t{1} << bits) < segments) ++bits;
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t d = 0; d < std::min(bits, width); ++d) {
      double& value = keys[static_cast<size_t>(i * width + d)];
      value = ((i / kSegment) >> d) & 1 ? std::abs(value) : -std::abs(value);
    }
  }
}

// v_i = A_c k_i, with the map A_c of the row's segment.
Matrix piecewise_values(const Matrix& keys, int64_t dim, int64_t value_dim, const Stream& stream) {
  const int64_t length = static_cast<int64_t>(keys.size()) / dim;
  Matrix values(static_cast<size_t>(length * value_dim));
  Matrix map(static_cast<size_t>(value_dim * dim));
  for (int64_t i = 0; i < length; ++i) {
    if (i % kSegment == 0) {
      for (size_t m = 0; m < map.size(); ++m)
        map[m] = stream.normal(static_cast<int64_t>(m) + i / kSegment * value_dim * dim);
    }
    for (int64_t c = 0; c < value_dim; ++c) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d)
        sum += map[static_cast<size_t>(c * dim + d)] * keys[static_cast<size_t>(i * dim + d)];
      values[static_cast<size_t>(i * value_dim + c)] = sum / std::sqrt(static_cast<double>(dim));
    }
  }
  return values;
}

// For each query the row of the key it is tied to.
int64_t tied_key(int64_t query, const Sizes& s) { return std::max<int64_t>(0, query + s.length_k - s.length_q); }

Matrix make_keys(Kind kind, uint64_t seed, int64_t head, const Sizes& s) {
  Matrix k = normals(Stream(seed, head, Purpose::key), s.length_k, s.dim);
  if (kind == Kind::aniso) scale_dimensions(k, s.dim);
  if (kind == Kind::cluster) {
    const Matrix centres = normals(Stream(seed, head, Purpose::centre), kCentres, s.dim);
    gather_around_centres(k, s.dim, centres, Stream(seed, head, Purpose::choice_key));
  }
  if (kind == Kind::pw) put_into_cones(k, s.dim);
  if (kind == Kind::mean) {
    const Stream mean(seed, head, Purpose::mean);
    for (size_t i = 0; i < k.size(); ++i) k[i] += 3 * mean.normal(static_cast<int64_t>(i) % s.dim);
  }
  shape_peaked_keys(kind, normals(Stream(seed, head, Purpose::mean), 1, s.dim), s.dim, k);
  return k;
}

Matrix make_queries(Kind kind, uint64_t seed, int64_t head, int64_t kv_head, const Matrix& keys, const Sizes& s) {
  Matrix q = normals(Stream(seed, head, Purpose::query), s.length_q, s.dim);
  if (kind == Kind::aniso) scale_dimensions(q, s.dim);
  if (kind == Kind::cluster) {
    const Matrix centres = normals(Stream(seed, kv_head, Purpose::centre), kCentres, s.dim);
    gather_around_centres(q, s.dim, centres, Stream(seed, head, Purpose::choice_query));
  }
  if ((kind == Kind::self || kind == Kind::pw) && s.length_k > 0) {
    for (int64_t i = 0; i < s.length_q; ++i) {
      for (int64_t d = 0; d < s.dim; ++d) {
        const double key = keys[static_cast<size_t>(tied_key(i, s) * s.dim + d)];
        double& value = q[static_cast<size_t>(i * s.dim + d)];
        value = kind == Kind::pw ? key : 2 * (key + 0.1 * value);
      }
    }
  }
  shape_peaked_queries(kind, normals(Stream(seed, kv_head, Purpose::mean), 1, s.dim), s, q);
  return q;
}

// Puts one head into a (batch, length, heads, width) tensor.
void put(std::vector<double>& tensor, const Matrix& m, int64_t b, int64_t h, int64_t length, int64_t heads,
         int64_t width) {
  for (int64_t i = 0; i < length; ++i) {
    std::copy_n(m.begin() + i * width, width, tensor.begin() + ((b * length + i) * heads + h) * width);
  }
}

}  // namespace

const char* name(Kind kind) {
  switch (kind) {
    case Kind::randn: return "randn";
    case Kind::aniso: return "aniso";
    case Kind::self: return "self";
    case Kind::cluster: return "cluster";
    case Kind::pw: return "pw";
    case Kind::mean: return "mean";
    case Kind::equal_values: return "equal_values";
    case Kind::equal_keys: return "equal_keys";
    case Kind::equal_pairs: return "equal_pairs";
    case Kind::one_token: return "one_token";
    case Kind::two_tokens: return "two_tokens";
    case Kind::zero_queries: return "zero_queries";
    case Kind::zero_keys: return "zero_keys";
    case Kind::zero_values: return "zero_values";
    case Kind::mean_query: return "mean_query";
    case Kind::one_large_value: return "one_large_value";
    case Kind::one_large_key: return "one_large_key";
    case Kind::short_keys: return "short_keys";
    case Kind::long_keys: return "long_keys";
    case Kind::long_queries: return "long_queries";
    case Kind::padding: return "padding";
    case Kind::long_both: return "long_both";
    case Kind::qk_norm: return "qk_norm";
    case Kind::queries6: return "queries6";
    case Kind::queries20: return "queries20";
    case Kind::two_channels: return "two_channels";
    case Kind::rope: return "rope";
    case Kind::sink: return "sink";
    case Kind::mean10: return "mean10";
    case Kind::mean30: return "mean30";
    case Kind::channel_scales: return "channel_scales";
  }
  return "?";
}

std::optional<Kind> find_kind(std::string_view wanted) {
  for (Kind kind : kinds) {
    if (wanted == name(kind)) return kind;
  }
  for (Kind kind : peaked_kinds) {
    if (wanted == name(kind)) return kind;
  }
  for (Kind kind : degenerate_kinds) {
    if (wanted == name(kind)) return kind;
  }
  return std::nullopt;
}

double uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t key = mix(seed + kGolden * (stream + 1));
  const uint64_t bits = mix(key + kGolden * (index + 1));
  return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
}

double normal(uint64_t seed, uint64_t stream,
              uint64_t index) {  // Box-Muller: an even index takes the cosine, the next the sine
  const double radius = std::sqrt(-2 * std::log(uniform(seed, stream, index / 2 * 2)));
  const double angle = 2 * std::numbers::pi * uniform(seed, stream, index / 2 * 2 + 1);
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

Tensors make(Kind kind, uint64_t seed, const Sizes& s) {
  Tensors t;
  t.q.resize(static_cast<size_t>(s.batch * s.length_q * s.heads_q * s.dim));
  t.k.resize(static_cast<size_t>(s.batch * s.length_k * s.heads_kv * s.dim));
  t.v.resize(static_cast<size_t>(s.batch * s.length_k * s.heads_kv * s.value_dim));
  const int64_t group = s.heads_kv > 0 ? s.heads_q / s.heads_kv : 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads_kv; ++h) {
      const int64_t kv_head = b * s.heads_kv + h;
      const Matrix k = make_keys(kind, seed, kv_head, s);
      Matrix v = kind == Kind::pw ? piecewise_values(k, s.dim, s.value_dim, Stream(seed, kv_head, Purpose::map))
                                  : normals(Stream(seed, kv_head, Purpose::value), s.length_k, s.value_dim);
      shape_peaked_values(kind, s.value_dim, v);
      put(t.k, k, b, h, s.length_k, s.heads_kv, s.dim);
      put(t.v, v, b, h, s.length_k, s.heads_kv, s.value_dim);
      for (int64_t g = h * group; g < (h + 1) * group; ++g) {
        put(t.q, make_queries(kind, seed, b * s.heads_q + g, kv_head, k, s), b, g, s.length_q, s.heads_q, s.dim);
      }
    }
  }
  degrade(kind, s, t);
  return t;
}

}  // namespace lla::data
