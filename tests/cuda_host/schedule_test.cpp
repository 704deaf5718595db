// The schedule against core::Mask, query by query.
#include "cuda/tensor/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "core/problem.hpp"
#include "cuda/tensor/scale.hpp"

namespace lla::cuda::sm90 {
namespace {

Shape make_shape(int batch, int heads, int lq, int lk, int left, int right) {
  Shape s;
  s.batch = batch, s.heads_q = heads, s.seqlen_q = lq, s.seqlen_k = lk, s.left = left, s.right = right;
  return s;
}

TEST(Schedule, EveryBlockOnce) {
  const Shape s = make_shape(3, 5, 300, 300, -1, 0);
  for (const int rows : {kWarpgroupRows, kBlockRows}) {  // items of one warpgroup and of two
    std::set<std::tuple<int, int, int>> seen;
    for (int64_t i = 0; i < s.items(rows); ++i) {
      const QueryBlock b = block_of_item(s, nullptr, nullptr, i, rows);
      EXPECT_FALSE(b.empty());
      EXPECT_EQ(b.first_row % rows, 0);
      seen.emplace(b.batch, b.head, b.first_row);
    }
    EXPECT_EQ(seen.size(), 3u * 5u * (rows == kBlockRows ? 3u : 5u));
  }
}

TEST(Schedule, LongestFirst) {
  const Shape s = make_shape(2, 3, 1000, 1000, -1, 0);
  int last = 1 << 30;
  for (int64_t i = 0; i < s.items(); ++i) {
    const QueryBlock b = block_of_item(s, nullptr, nullptr, i);
    const int tiles = tiles_of(visible_keys(s, b, b.first_row, kBlockRows), 80).count();
    EXPECT_LE(tiles, last);
    last = tiles;
  }
}

// Blocks of the first queries, then the others, both longest first; every block once, also where all blocks are early.
TEST(Schedule, EarlyBlocksFirst) {
  for (const int early_rows : {0, 63, 64, 200, 256, 300, 1000}) {
    Shape s = make_shape(1, 2, 300, 300, -1, 0);
    s.early_rows = early_rows;
    const int blocks = 5, early = std::min(early_rows / kWarpgroupRows, blocks);
    std::set<std::tuple<int, int>> seen;
    for (int64_t i = 0; i < s.items(kWarpgroupRows); ++i) {
      const QueryBlock b = block_of_item(s, nullptr, nullptr, i, kWarpgroupRows);
      const int level = static_cast<int>(i) / 2;
      EXPECT_EQ(b.first_row, kWarpgroupRows * (level < early ? early - 1 - level : blocks - 1 - (level - early)))
          << early_rows;
      seen.emplace(b.head, b.first_row);
    }
    EXPECT_EQ(seen.size(), 2u * blocks);
  }
}

// Bundles of four of fifteen heads: one bundle after the other, longest first within each, every block once.
TEST(Schedule, BundlesOfHeads) {
  Shape s = make_shape(3, 5, 300, 300, -1, 0);
  s.bundle = 4;
  std::set<std::tuple<int, int, int>> seen;
  int bundle = 0, last_row = 1 << 30;
  for (int64_t i = 0; i < s.items(); ++i) {
    const QueryBlock b = block_of_item(s, nullptr, nullptr, i);
    const int of_block = (b.batch * 5 + b.head) / 4;
    ASSERT_TRUE(of_block == bundle || of_block == bundle + 1);
    if (of_block != bundle) last_row = 1 << 30;
    EXPECT_LE(b.first_row, last_row);
    bundle = of_block, last_row = b.first_row;
    seen.emplace(b.batch, b.head, b.first_row);
  }
  EXPECT_EQ(bundle, 3);
  EXPECT_EQ(seen.size(), 3u * 5u * 3u);
}

TEST(Schedule, PackedSequences) {
  Shape s = make_shape(4, 2, 200, 200, -1, 0);
  s.packed = 1, s.spans = kPackedSpans, s.total_q = 330, s.total_k = 330;
  const int32_t cu[] = {0, 0, 200, 201, 330};  // the first is empty
  int rows = 0;
  for (int64_t i = 0; i < s.items(); ++i) {
    const QueryBlock b = block_of_item(s, cu, cu, i);
    EXPECT_EQ(b.length_q, cu[b.batch + 1] - cu[b.batch]);
    EXPECT_EQ(b.start_k, cu[b.batch]);
    if (!b.empty()) rows += b.last_row(b.first_row, kBlockRows) - b.first_row + 1;
  }
  EXPECT_EQ(rows, 2 * 330);
}

struct MaskCase {
  int lq, lk, left, right;
};

class ScheduleMask : public testing::TestWithParam<MaskCase> {};

TEST_P(ScheduleMask, AgreesWithCore) {
  const MaskCase c = GetParam();
  const Shape s = make_shape(1, 1, c.lq, c.lk, c.left, c.right);
  const core::Mask mask{c.left, c.right};
  for (int tile : {80, 128}) {
    const int64_t most = most_tiles(s, tile);
    for (int64_t item = 0; item < s.items(); ++item) {
      const QueryBlock b = block_of_item(s, nullptr, nullptr, item);
      for (int rows : {64, kBlockRows}) {
        for (int first = b.first_row; first < std::min(b.first_row + kBlockRows, c.lq); first += rows) {
          const int last = std::min(first + rows, c.lq) - 1;
          int64_t begin = c.lk, end = 0, common_begin = 0, common_end = c.lk, most_seen = 0;
          for (int i = first; i <= last; ++i) {
            const int64_t row_begin = mask.begin(i, c.lq, c.lk), row_end = mask.end(i, c.lq, c.lk);
            const KeyRange keys = visible_keys(s, b, i);
            EXPECT_EQ(keys.begin, row_begin);
            EXPECT_EQ(keys.end, row_end);
            common_begin = std::max(common_begin, row_begin), common_end = std::min(common_end, row_end);
            if (row_begin < row_end) begin = std::min(begin, row_begin), end = std::max(end, row_end);
            most_seen = std::max(most_seen, row_end - row_begin);
          }
          const KeyRange common = common_keys(s, b, first, rows);
          EXPECT_EQ(common.begin, common_begin);
          EXPECT_EQ(common.end, common_end);
          const int32_t bound = most_keys(s, visible_keys(s, b, first, rows));
          EXPECT_GE(bound, most_seen);
          // Exact but at the ends of a sequence, where a window closed on both sides may hang over.
          if (c.left < 0 || c.right < 0 || most_seen == c.left + c.right + 1) {
            EXPECT_EQ(bound, most_seen);
          }
          const TileRange tiles = tiles_of(visible_keys(s, b, first, rows), tile);
          EXPECT_LE(tiles.count(), most);
          if (begin < end) {
            EXPECT_LE(tiles.begin * tile, begin);
            EXPECT_GE(tiles.end * tile, end);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ScheduleMask,
                         testing::Values(MaskCase{1, 1, -1, 0}, MaskCase{257, 257, -1, 0}, MaskCase{300, 100, -1, 0},
                                         MaskCase{100, 300, -1, 0}, MaskCase{200, 300, -1, -1},
                                         MaskCase{500, 500, 64, 0}, MaskCase{500, 700, 30, 20},
                                         MaskCase{700, 500, 100, 0}, MaskCase{130, 0, -1, 0},
                                         MaskCase{1000, 1000, 0, 0}, MaskCase{2000, 2000, 255, 255}));

TEST(Scale, BringsTheLargestNearTheTop) {
  for (float x : {1.0f, 0.3f, 7.5f, 65504.0f, 1e-10f, 3e10f}) {
    const float scaled = power_of_two_scale(x) * x;
    EXPECT_GE(scaled, 16384.0f);
    EXPECT_LT(scaled, 32768.0f);
  }
  EXPECT_EQ(power_of_two_scale(0.0f), 1.0f);
  EXPECT_GT(power_of_two_scale(1e-38f), 0.0f);
}

TEST(Scale, BoundStaysBelowOne) {
  for (float x : {1.0f, 0.3f, 7.5f, 1e20f, 1e-20f}) {
    EXPECT_LE(power_of_two_below(x) * x, 1.0f);
    EXPECT_GE(power_of_two_below(x) * x, 0.25f);
  }
  EXPECT_EQ(power_of_two_below(0.0f), 0.0f);
}

}  // namespace
}  // namespace lla::cuda::sm90
