#include "regression/data.hpp"

#include <bit>
#include <cmath>

#include <fmt/core.h>

#include "common/gemm.hpp"

namespace lla::experiments {

std::string problem_with(const RegressionSetting& s) {
  if (s.segment <= 0 || s.length % s.segment != 0) {
    return fmt::format("segment {} does not divide the sequence length {}", s.segment, s.length);
  }
  const unsigned segments = static_cast<unsigned>(s.length / s.segment);
  if (!std::has_single_bit(segments)) {
    return fmt::format("{} segments of {}: the cones need a power of two", segments, s.segment);
  }
  if (s.d < 2 || s.d % 2 != 0 || s.d > 256) return fmt::format("dimension {} is not an even number from 2 to 256", s.d);
  if (std::countr_zero(segments) > s.d) {
    return fmt::format("{} segments need {} sign bits, more than the dimension {}", segments,
                       std::countr_zero(segments), s.d);
  }
  if (s.sequences <= 0) return fmt::format("{} sequences: at least one is needed", s.sequences);
  for (const double ridge : s.ridges) {
    if (!(ridge >= 0) || !std::isfinite(ridge)) return fmt::format("ridge {} is not a finite number >= 0", ridge);
  }
  for (const double ridge : s.mesa_ridges) {
    if (!(ridge > 0) || !std::isfinite(ridge))
      return fmt::format("MesaNet's ridge {} is not a finite number > 0", ridge);
  }
  if (!(s.scale > 0) || !std::isfinite(s.scale)) return fmt::format("scale {} is not a finite number > 0", s.scale);
  if (!(s.noise >= 0) || !std::isfinite(s.noise)) return fmt::format("noise {} is not a finite number >= 0", s.noise);
  if (s.query_noise && !(*s.query_noise >= 0 && *s.query_noise <= 1)) {
    return fmt::format("query noise {} is not a number from 0 to 1", *s.query_noise);
  }
  return "";
}

std::vector<Series> series(const RegressionSetting& s) {
  std::vector<Series> list;
  for (const double ridge : s.ridges) list.push_back({Model::lla, ridge});
  list.push_back({Model::softmax, 0});
  list.push_back({Model::linear, 0});
  for (const double ridge : s.mesa_ridges) list.push_back({Model::mesanet, ridge});
  list.push_back({Model::random, 0});
  return list;
}

Stream stream(const RegressionSetting& s, int64_t sequence, Draw what) {
  const uint64_t item = uint64_t(s.d) << 52 | uint64_t(s.segment) << 40 | static_cast<uint64_t>(sequence);
  return Stream(s.seed, item, static_cast<uint64_t>(what));
}

PiecewiseLinear::PiecewiseLinear(const RegressionSetting& setting)
    : setting_(setting),
      sign_bits_(std::countr_zero(static_cast<unsigned>(setting.length / setting.segment))),
      map_(static_cast<size_t>(setting.d) * setting.d) {}

void PiecewiseLinear::shape(float* x) const {
  const RegressionSetting& s = setting_;
  for (int i = 0; i < s.length; ++i, x += s.d) {
    // The cone of segment c = 1, 2, ...: sign j of its points is bit j of c.
    const int c = i / s.segment + 1;
    for (int j = 0; j < sign_bits_; ++j) x[j] = std::copysign(x[j], (c >> j & 1) ? 1.0f : -1.0f);
    if (!s.qk_norm) continue;
    double squares = 0;
    for (int j = 0; j < s.d; ++j) squares += double(x[j]) * x[j];
    const float factor = static_cast<float>(std::sqrt(s.d / squares));
    for (int j = 0; j < s.d; ++j) x[j] *= factor;
  }
}

void PiecewiseLinear::generate(int64_t sequence, const Sequence& out) {
  const RegressionSetting& s = setting_;
  const size_t d = s.d, size = s.length * d, square = d * d;
  stream(s, sequence, Draw::keys).normal(out.k, size);
  stream(s, sequence, Draw::noise).normal(out.v, size);
  if (s.query_noise) {
    const float fresh = static_cast<float>(*s.query_noise), kept = std::sqrt(1 - fresh * fresh);
    stream(s, sequence, Draw::queries).normal(out.q, size);
    for (size_t i = 0; i < size; ++i) out.q[i] = kept * out.k[i] + fresh * out.q[i];
    shape(out.q);
  }
  shape(out.k);
  const Stream maps = stream(s, sequence, Draw::maps);
  for (int first = 0, c = 1; first < s.length; first += s.segment, ++c) {
    const size_t at = first * d;
    maps.normal(map_.data(), square, (c - 1) * square);
    gemm(s.segment, d, d, 1.0f, {out.k + at, d, 1}, map_.data(), d, static_cast<float>(s.noise), out.v + at, d);
    if (s.query_noise) gemm(s.segment, d, d, 1.0f, {out.q + at, d, 1}, map_.data(), d, 0.0f, out.target + at, d);
  }
}

}  // namespace lla::experiments
