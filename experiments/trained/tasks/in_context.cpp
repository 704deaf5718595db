// In-context regression on piecewise linear data: L shuffled pairs (x; y) with y = A_c x + noise, then queries (x'; 0)
// whose noiseless labels A_c x' are asked for. Segment c's points lie in the cone of the paper's appendix.
#include <bit>
#include <cmath>

#include "tasks/draws.hpp"
#include "tasks/settings.hpp"

namespace lla::trained {
namespace {

enum Purpose : uint64_t { kPoints, kNoise, kMaps, kOrder, kQueries, kSegments };

class InContext : public Task {
 public:
  explicit InContext(const Json& values) {
    Settings s(values, "in-context's task");
    dim_ = s.whole("dim", 32, 2, 256);
    length_ = s.whole("length", 64, 2, 1 << 16);
    segment_ = s.whole("segment", length_, 1, length_);
    queries_ = s.whole("queries", 16, 1, 1 << 12);
    noise_ = static_cast<float>(s.number("noise", 0.1, 0, 1e3));
    test_noise_ = static_cast<float>(s.number("test_noise", 0, 0, 1e3));
    s.finish();
    const auto segments = static_cast<unsigned>(length_ / segment_);
    if (length_ % segment_ != 0 || !std::has_single_bit(segments)) {
      s.refuse("segment", fmt::format("a length that cuts {} into a power of two", length_));
    }
    sign_bits_ = std::countr_zero(segments);
    if (dim_ % 2 != 0 || sign_bits_ > dim_) s.refuse("dim", "an even number of at least as many as the sign bits");
  }

  Layout layout() const override {
    return {.length = length_ + queries_, .features = 2 * dim_, .labels = queries_, .targets = dim_, .tail = queries_};
  }

  void generate(uint64_t seed, Part part, int64_t index, const Example& out) const override {
    const auto from = [&](Purpose purpose) { return stream(seed, part, index, purpose); };
    const int64_t d = dim_, segments = length_ / segment_, square = d * d;
    const float noise = part == Part::training ? noise_ : test_noise_;
    thread_local std::vector<float> maps, points, noises;
    maps.resize(segments * square), points.resize(length_ * d), noises.assign(length_ * d, 0);
    from(kMaps).normal(maps.data(), maps.size());
    const float spread = 1 / std::sqrt(static_cast<float>(d));
    for (float& value : maps) value *= spread;
    if (noise > 0) from(kNoise).normal(noises.data(), noises.size());

    std::vector<int32_t> place(length_);
    for (int64_t i = 0; i < length_; ++i) place[i] = static_cast<int32_t>(i);
    Draws(from(kOrder)).shuffle(place);
    from(kPoints).normal(points.data(), points.size());
    for (int64_t i = 0; i < length_; ++i) {
      const int64_t c = i / segment_;
      float* token = out.features + place[i] * 2 * d;
      put_point(points.data() + i * d, c, token);
      float* y = token + d;
      apply(maps.data() + c * square, token, y);
      for (int64_t j = 0; j < d; ++j) y[j] += noise * noises[i * d + j];
    }

    points.resize(queries_ * d);
    from(kQueries).normal(points.data(), points.size());
    Draws draw_segment(from(kSegments));
    for (int64_t i = 0; i < queries_; ++i) {
      const int64_t c = draw_segment.below(segments);
      float* token = out.features + (length_ + i) * 2 * d;
      put_point(points.data() + i * d, c, token);
      std::fill(token + d, token + 2 * d, 0.0f);
      apply(maps.data() + c * square, token, out.targets + i * d);
      out.positions[i] = static_cast<int32_t>(length_ + i);
    }
  }

 private:
  // Into the cone of segment c = 0, 1, ...: the sign of coordinate j is bit j of the segment's number, which counts
  // from one.
  void put_point(const float* z, int64_t c, float* x) const {
    for (int64_t j = 0; j < dim_; ++j) {
      x[j] = j < sign_bits_ ? std::copysign(z[j], ((c + 1) >> j & 1) ? 1.0f : -1.0f) : z[j];
    }
  }
  // y = A x, with A stored by columns so that the inner loop runs along y.
  void apply(const float* a, const float* x, float* y) const {
    std::fill(y, y + dim_, 0.0f);
    for (int64_t j = 0; j < dim_; ++j) {
      for (int64_t i = 0; i < dim_; ++i) y[i] += a[j * dim_ + i] * x[j];
    }
  }

  int64_t dim_, length_, segment_, queries_;
  float noise_, test_noise_;
  int sign_bits_;
};

}  // namespace

std::unique_ptr<Task> make_in_context(const Json& settings) { return std::make_unique<InContext>(settings); }

}  // namespace lla::trained
