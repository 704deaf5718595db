#include "data/peaked.hpp"

#include <algorithm>
#include <cmath>

namespace lla::data {
namespace {

void scale(std::vector<double>& rows, double factor) {
  for (double& x : rows) x *= factor;
}

// Every row gets this rms.
void normalize(std::vector<double>& rows, size_t dim, double rms) {
  for (size_t at = 0; at < rows.size(); at += dim) {
    double squares = 0;
    for (size_t c = 0; c < dim; ++c) squares += rows[at + c] * rows[at + c];
    const double factor = rms / std::sqrt(squares / static_cast<double>(dim));
    for (size_t c = 0; c < dim; ++c) rows[at + c] *= factor;
  }
}

// Means of +-2 by channel, then a rotation of each pair of channels by the row's position (from `first` on).
void rotate(std::vector<double>& rows, const Channels& random, size_t dim, double first) {
  for (size_t at = 0; at < rows.size(); at += dim) {
    const size_t row = at / dim;
    const double position = first + static_cast<double>(row);
    for (size_t c = 0; c < dim; ++c) rows[at + c] += random[c] < 0 ? -2 : 2;
    for (size_t c = 0; c + 1 < dim; c += 2) {
      const double angle = position * std::pow(10000.0, -static_cast<double>(c) / static_cast<double>(dim));
      const double x = rows[at + c], y = rows[at + c + 1];
      rows[at + c] = x * std::cos(angle) - y * std::sin(angle);
      rows[at + c + 1] = x * std::sin(angle) + y * std::cos(angle);
    }
  }
}

void scale_channels(std::vector<double>& rows, size_t dim) {
  const double last = static_cast<double>(std::max<size_t>(dim, 2) - 1);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] *= std::pow(10.0, 2 - 6 * static_cast<double>(i % dim) / last);
}

double length(const Channels& v) {
  double squares = 0;
  for (double x : v) squares += x * x;
  return std::sqrt(squares);
}

}  // namespace

void shape_peaked_keys(Kind kind, const Channels& random, int64_t dim, std::vector<double>& k) {
  const auto width = static_cast<size_t>(dim);
  const auto add_mean = [&](double size) {
    for (size_t i = 0; i < k.size(); ++i) k[i] += size * random[i % width];
  };
  switch (kind) {
    case Kind::long_both: return scale(k, 4);
    case Kind::qk_norm: return normalize(k, width, 2.5);
    case Kind::two_channels:
      for (size_t i = 0; i < k.size(); ++i) k[i] *= i % width < 2 ? 20 : 1;
      return;
    case Kind::rope: return rotate(k, random, width, 0);
    case Kind::sink:
      for (size_t c = 0; c < width && c < k.size(); ++c) k[c] = 20 * random[c] / length(random);
      return;
    case Kind::mean10: return add_mean(10);
    case Kind::mean30: return add_mean(30);
    case Kind::channel_scales: return scale_channels(k, width);
    default: return;
  }
}

void shape_peaked_queries(Kind kind, const Channels& random, const Sizes& s, std::vector<double>& q) {
  const auto width = static_cast<size_t>(s.dim);
  switch (kind) {
    case Kind::long_both: return scale(q, 4);
    case Kind::qk_norm: return normalize(q, width, 2.5);
    case Kind::queries6: return scale(q, 6);
    case Kind::queries20: return scale(q, 20);
    case Kind::rope: return rotate(q, random, width, static_cast<double>(s.length_k - s.length_q));
    case Kind::sink:
      for (size_t i = 0; i < q.size(); ++i) q[i] += 2 * random[i % width] / length(random);
      return;
    case Kind::channel_scales: return scale_channels(q, width);
    default: return;
  }
}

void shape_peaked_values(Kind kind, int64_t value_dim, std::vector<double>& v) {
  if (kind != Kind::sink) return;
  for (size_t c = 0; c < static_cast<size_t>(value_dim) && c < v.size(); ++c) v[c] *= 0.1;
}

}  // namespace lla::data
