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
  if (!(s.ridge >= 0) || !std::isfinite(s.ridge)) return fmt::format("ridge {} is not a finite number >= 0", s.ridge);
  if (!(s.mesa_ridge > 0) || !std::isfinite(s.mesa_ridge)) {
    return fmt::format("MesaNet's ridge {} is not a finite number > 0", s.mesa_ridge);
  }
  if (!(s.scale > 0) || !std::isfinite(s.scale)) return fmt::format("scale {} is not a finite number > 0", s.scale);
  if (!(s.noise >= 0) || !std::isfinite(s.noise)) return fmt::format("noise {} is not a finite number >= 0", s.noise);
  return "";
}

Stream stream(const RegressionSetting& s, int64_t sequence, Draw what) {
  const uint64_t item = uint64_t(s.d) << 52 | uint64_t(s.segment) << 40 | static_cast<uint64_t>(sequence);
  return Stream(s.seed, item, static_cast<uint64_t>(what));
}

PiecewiseLinear::PiecewiseLinear(const RegressionSetting& setting)
    : setting_(setting),
      sign_bits_(std::countr_zero(static_cast<unsigned>(setting.length / setting.segment))),
      map_(static_cast<size_t>(setting.d) * setting.d) {}

void PiecewiseLinear::generate(int64_t sequence, float* k, float* v) {
  const RegressionSetting& s = setting_;
  const size_t d = s.d, size = s.length * d, square = d * d;
  stream(s, sequence, Draw::keys).normal(k, size);
  stream(s, sequence, Draw::noise).normal(v, size);
  const Stream maps = stream(s, sequence, Draw::maps);
  for (int first = 0, c = 1; first < s.length; first += s.segment, ++c) {
    // The cone of segment c = 1, 2, ...: sign j of its points is bit j of c.
    for (int i = first; i < first + s.segment; ++i) {
      for (int j = 0; j < sign_bits_; ++j) k[i * d + j] = std::copysign(k[i * d + j], (c >> j & 1) ? 1.0f : -1.0f);
    }
    maps.normal(map_.data(), square, (c - 1) * square);
    gemm(s.segment, d, d, 1.0f, {k + first * d, d, 1}, map_.data(), d, static_cast<float>(s.noise), v + first * d, d);
  }
}

}  // namespace lla::experiments
