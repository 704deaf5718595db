// The host side of the Hopper backward: how it divides the workspace and which powers of two it gives its operands. No
// GPU needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/sm90/backward/key_pass_slots.hpp"
#include "cuda/sm90/backward/workspace.hpp"
#include "cuda/sm90/plan.hpp"
#include "cuda/sm90/sm90.hpp"
#include "cuda/tensor/backward/exponents.hpp"
#include "cuda/tensor/low_parts.hpp"

namespace lla::cuda::sm90 {
namespace {

core::Problem problem(int64_t length, int64_t dim, core::RidgeShape ridge = core::RidgeShape::token) {
  core::Problem p;
  p.operation = core::Operation::backward;
  p.device = core::Device::cuda;
  p.dtype = DType::bf16;
  p.batch = 2;
  p.seqlen_q = p.seqlen_k = length;
  p.total_q = p.total_k = 2 * length;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.dim = p.value_dim = dim;
  p.ridge = ridge;
  p.mask.right = 0;
  return p;
}

struct Section {
  const char* name;
  int64_t begin, bytes;
};

void expect_disjoint(std::vector<Section> sections, int64_t size) {
  std::sort(sections.begin(), sections.end(), [](const Section& a, const Section& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.bytes < b.bytes;
  });
  int64_t end = 0;
  for (const Section& s : sections) {
    EXPECT_EQ(s.begin % 256, 0) << s.name;
    EXPECT_GE(s.begin, end) << s.name;
    end = s.begin + s.bytes;
  }
  EXPECT_LE(end, size);
}

// Read where they are brought; and what is left out where x is given, or where a step has no low parts, is y's, or low.
TEST(Sm90Backward, TilesOfTheKeyPassAreReadWhereTheyAreBrought) {
  for (int i = 0; i < kQueryOperands; ++i) {
    const auto operand = static_cast<QueryOperand>(i);
    const TilePlace place = tile_place(operand);
    ASSERT_TRUE(place.slot >= 0 && place.slot < kKeyPassSlots) << i;
    EXPECT_EQ(tile_of_slot(place.slot, place.half), operand);
    EXPECT_EQ(place.slot == kLowSlot, operand == kOpXLow || operand == kOpYLow) << i;
    EXPECT_EQ(place.slot != kScoreSlot && place.half == 1, operand == kOpYLow || operand == kOpYHigh) << i;
  }
}

TEST(Sm90Backward, SectionsOfTheWorkspaceDoNotMeet) {
  for (const auto ridge : {core::RidgeShape::none, core::RidgeShape::scalar, core::RidgeShape::dimension}) {
    for (const int64_t dim : {8, 64, 80, 128}) {
      const core::Problem p = problem(333, dim, ridge);
      const int workers = p.given_x() ? 0 : 7;
      const int64_t weights = p.given_x() ? 0 : cached_weights_per_block(p);
      const BackwardLayout at(p, shape_of(p), workers, weights);
      const int64_t padded = padded_dim(dim, dim), rows = p.rows(), keys = p.batch * p.heads_kv * p.seqlen_k;
      const std::vector<Section> kept = {
          {"header", at.forward.header, sizeof(Header)},
          {"head statistics", at.forward.head_statistics,
           p.batch * p.heads_kv * static_cast<int64_t>(sizeof(HeadStatistics))},
          {"chunk maxima", at.forward.chunk_maxima, p.batch * p.heads_kv * 3 * 8},
          {"key marks", at.forward.key_marks, keys},
          {"value marks", at.forward.value_marks, keys},
          {"keys", at.forward.keys, keys * padded * 2},
          {"values", at.forward.values, keys * padded * 2},
          {"bounds", at.bounds, at.bounds_bytes},
          {"head exponents", at.head_exponents, p.batch * p.heads_kv * 8},
          {"rows", at.rows, (rows + 64) * 32},
          {"units", at.units, rows * static_cast<int64_t>(sizeof(RowUnits))},
          {"y", at.y, p.given_x() ? 0 : rows * padded * 4},
          {"sizes", at.sizes, rows * static_cast<int64_t>(sizeof(RowSizes))},
          {"starts", at.starts, p.given_x() ? 0 : rows * 16},
          {"low", at.low, operand_blocks(shape_of(p)) * 4},
          {"ridge sums", at.ridge_sums, operand_blocks(shape_of(p)) * 8},
      };
      // The solve's memory and the operands take turns on the same bytes, each apart from all that is kept.
      std::vector<Section> solving = kept, multiplying = kept;
      solving.push_back({"scratch", at.forward.scratch, at.forward.scratch_stride * workers});
      solving.push_back({"weights", at.forward.weights, at.forward.weights_stride * workers});
      for (int i = 0; i < (p.given_x() ? kOpYHigh : kQueryOperands); ++i)
        multiplying.push_back({"operand", at.operand[i], rows * padded * 2});
      expect_disjoint(solving, at.size);
      expect_disjoint(multiplying, at.size);
    }
  }
}

TEST(Sm90Backward, WorkspaceGrowsWithTheLengthNotItsSquare) {
  const core::Machine machine = core::h200();
  const auto bytes = [&](int64_t length) {
    core::Problem p = problem(length, 128, core::RidgeShape::none);
    return static_cast<double>(plan(p, machine).workspace_bytes);
  };
  EXPECT_NEAR(bytes(65536) / bytes(16384), 4, 0.01);
}

TEST(Sm90Backward, ExponentsBoundTheirNumbers) {
  EXPECT_EQ(exponent_above(0), kNoExponent);
  for (const float x : {1e-30f, 0.5f, 0.75f, 1.0f, 1.5f, 3e4f, 1e30f}) {
    EXPECT_LT(x, power_of_two(exponent_above(x)));
    EXPECT_GE(x, power_of_two(exponent_above(x) - 1));
  }
}

TEST(Sm90Backward, PowersOfTwoGoBeyondFloats) {
  for (const int e : {-240, -130, -127, -1, 0, 1, 127, 130, 240}) {
    const double want = std::ldexp(1.25, e - 3) / std::ldexp(1, e > 0 ? 200 : e < -100 ? -200 : 0);
    const float from = static_cast<float>(std::ldexp(1.25, -3) / std::ldexp(1, e > 0 ? 200 : e < -100 ? -200 : 0));
    if (from == 0 || !std::isfinite(from) || std::fabs(want) < 1e-37 || want > 1e38) continue;
    EXPECT_EQ(PowerOfTwo(e) * from, static_cast<float>(want)) << e;
  }
  EXPECT_EQ(PowerOfTwo(200) * 1e30f, INFINITY);
  EXPECT_EQ(PowerOfTwo(-200) * 0x1p100f, 0x1p-100f);
}

// All values zero: b is zero, and G alone must decide the scale, whatever its size.
TEST(Sm90Backward, HeadsWithoutValuesFollowTheGradient) {
  for (const int m : {-100, 0, 60}) {
    const RowExponents row =
        row_exponents(1, 2 + m, 3, kNoExponent, 5 + m, 6, kNoExponent, 2, kNoExponent, 0, kNoEnergy);
    uint32_t bounds[kHeadBounds];
    row_bounds(bounds, row);
    HeadBounds head{};
    std::memcpy(&head, bounds, sizeof bounds);
    const HeadExponents of(head, 0.125f, 12, 0);
    EXPECT_EQ(2 + m + of.row_alpha(row) + of.g, 15) << "G fills fp16, m " << m;
    EXPECT_LE(3 + of.row_beta(row) + of.rows, 15) << "x";
    EXPECT_LE(1 + of.row_both(row) + of.q, 15) << "q";
  }
}

// What rounding to fp16 takes from x, for normal numbers.
double half_error(double x) {
  int exponent;
  const double mantissa = std::frexp(x, &exponent);
  return x - std::ldexp(std::round(std::ldexp(mantissa, 11)), exponent - 11);
}

// Whatever the rows are, no operand reaches fp16's largest number, and the largest of the four is not far below it.
TEST(Sm90Backward, OperandsOfAnyRowsFitHalfPrecision) {
  std::mt19937 random(5);
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  for (int trial = 0; trial < 2000; ++trial) {
    const int spread = draw(0, 40);
    const int key_norm = draw(-10, 10), value_norm = draw(-10, 10), key_scale = draw(-5, 15),
              value_scale = draw(-5, 15);
    const float scale = std::ldexp(draw(0, 1) ? 0.0883883f : -0.7f, draw(-3, 3));
    std::vector<RowExponents> rows;
    HeadBounds bounds{};
    for (int i = draw(1, 30); i > 0; --i) {
      const auto size = [&] { return draw(0, 9) == 0 ? kNoExponent : draw(-spread, spread); };
      const int q = size(), g = size(), x = size(), y = size();
      const auto norm = [&](int e) { return plus(e, draw(0, 4)); };
      rows.push_back(row_exponents(q, g, x, y, norm(g), norm(x), norm(y), key_norm, value_norm, draw(-16, 0),
                                   draw(0, 3) == 0 ? kNoEnergy : draw(1, 30)));
      uint32_t of_row[kHeadBounds];
      row_bounds(of_row, rows.back());
      uint32_t* const fields = reinterpret_cast<uint32_t*>(&bounds);
      for (int f = 0; f < kHeadBounds; ++f) fields[f] = std::max(fields[f], of_row[f]);
    }
    const HeadExponents head(bounds, scale, key_scale, value_scale);
    int largest = kNoExponent;
    for (const RowExponents& r : rows) {
      const int alpha = head.row_alpha(r), beta = head.row_beta(r), both = head.row_both(r);
      EXPECT_GE(alpha, r.alpha);
      EXPECT_GE(beta, r.beta);
      EXPECT_GE(both, r.both);
      EXPECT_LE(r.both, plus(r.alpha, r.beta));
      const int sizes[] = {plus(r.q, both + head.q), plus(r.g, alpha + head.g), plus(r.x, beta + head.rows),
                           plus(r.y, alpha + head.rows)};
      for (const int e : sizes) {
        EXPECT_LE(e, 15);
        largest = std::max(largest, e);
      }
    }
    EXPECT_EQ(head.g + value_scale, head.rows + key_scale);  // G V and Y K share an accumulator
    EXPECT_LE(std::fabs(scale), power_of_two(head.scale));
    EXPECT_EQ(head.q, head.rows + 1 + head.scale);  // dS Q, P b X and P a Y share another
    if (largest > kNoExponent / 2) {
      EXPECT_GE(largest, 15 - kSpread - 1);
    }
  }
}

// Keys of given spreads along the axes: whatever the rule lets pass, rounding moves E and F by less than it promises.
TEST(Sm90Backward, LowPartsAreLeftOutOnlyWhereRoundingIsSmall) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  const int dim = 128;
  int without = 0, with = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const double tolerance = trial % 2 ? 1e-3 : 1e-4, ridge = std::ldexp(1, -(trial % 8));
    double x2 = 0, variance = 0, moved = 0, largest = 0;
    for (int d = 0; d < dim; ++d) {
      const double spread = trial % 3 ? 0.7 + 0.6 * (d % 2) : 3.0 / (1 + d);  // standard deviation
      const double x = normal(random) / (spread * spread + ridge);
      const double error = static_cast<double>(half_error(x));
      x2 += x * x, variance += x * x * spread * spread, moved += error * error * spread * spread;
      largest = std::max(largest, spread * spread + ridge);
    }
    const LowParts parts = LowParts::of(tolerance);
    const double energy = variance + ridge * x2;
    const auto f = [](double v) { return static_cast<float>(v); };
    if (!parts.of_y(f(x2), f(largest), f(variance))) {
      EXPECT_LE(std::sqrt(moved / variance), 0.7 * tolerance) << trial;
      ++without;
    } else {
      ++with;
    }
    if (f(energy) >= parts.least(f(x2), f(largest), f(ridge * x2))) {
      EXPECT_LE(std::sqrt(moved / (1 + variance)), 0.7 * tolerance) << trial;
    }
    EXPECT_TRUE(parts.of_y(NAN, 1, 1));
    EXPECT_FALSE(0.0f >= parts.least(NAN, 1, 1));
  }
  EXPECT_GT(without, 50);
  EXPECT_GT(with, 50);
}

// Rows of random logits, some with a key far above the rest, and their weights rounded as the kernels do.
TEST(Sm90Backward, TheBoundOfTheOtherWeightsHoldsAndIsTight) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int row = 0; row < 2000; ++row) {
    const int keys = 1 + row % 50;
    const float lead = static_cast<float>(row % 37);
    std::vector<double> logits(static_cast<size_t>(keys));
    for (double& l : logits) l = 2 * normal(random);
    logits[static_cast<size_t>(row) % logits.size()] += lead;
    const double max = std::ceil(*std::max_element(logits.begin(), logits.end()));
    double omega = 0, mean = 0, largest = 0;
    for (const double l : logits) {
      const double step = std::exp2(std::max(-24.0, std::floor(l - max + 15) - 10));  // of fp16 at 2^15 exp2(l - max)
      const double weight = std::round(std::exp2(l - max + 15) / step) * step;
      omega += weight, mean += weight * l, largest = std::max(largest, weight);
    }
    mean /= omega;
    const double rest = 1 - largest / omega;
    const float bound = rest_bound(std::exp2(static_cast<float>(mean - max)), static_cast<float>(omega / 32768));
    EXPECT_GE(bound, rest) << row;
    EXPECT_LE(bound, 1) << row;
    if (lead > 25) {
      EXPECT_LE(bound, 0x1p-9f + 30 * rest) << row;
    }
  }
  EXPECT_EQ(rest_bound(0, 0), 1);  // no keys
}

}  // namespace
}  // namespace lla::cuda::sm90
