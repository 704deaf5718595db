// The walk through live tiles against a plain list of them.
#include "cuda/sm90/live_tiles.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace lla::cuda::sm90 {
namespace {

constexpr int kWords = 4;  // 128 tiles have bits

// Live tiles of two warpgroups, each with its own visible range.
struct Item {
  LiveTiles<kWords, 2> map{};
  TileRange visible[2];
  int count;

  bool takes(int member, int tile) const {
    if (tile < visible[member].begin || tile >= visible[member].end) return false;
    return tile >= kWords * 32 || ((map.bits[member][tile / 32] >> (tile % 32)) & 1);
  }
  LiveWalk<kWords, 2, Alone> walk() const { return {&map, {visible[0], visible[1]}, count}; }
  std::vector<int> live() const {
    std::vector<int> tiles;
    for (int tile = 0; tile < count; ++tile) {
      if (takes(0, tile) || takes(1, tile)) tiles.push_back(tile);
    }
    return tiles;
  }
};

Item draw(std::mt19937& random, int count, double density) {
  Item item;
  item.count = count;
  // Together the warpgroups see all tiles of their item.
  item.visible[0] = {0, static_cast<int>(random() % (count + 1))};
  item.visible[1] = {static_cast<int>(random() % (item.visible[0].end + 1)), count};
  std::bernoulli_distribution alive(density);
  for (int member = 0; member < 2; ++member) {
    for (int tile = item.visible[member].begin; tile < std::min(item.visible[member].end, kWords * 32); ++tile) {
      if (alive(random)) item.map.bits[member][tile / 32] |= 1u << (tile % 32);
    }
  }
  return item;
}

class LiveTilesTest : public testing::TestWithParam<int> {};

TEST_P(LiveTilesTest, WalksThroughEveryLiveTileInOrder) {
  std::mt19937 random(GetParam());
  for (const double density : {0.0, 0.1, 0.5, 0.95, 1.0}) {
    const Item item = draw(random, GetParam(), density);
    const std::vector<int> live = item.live();
    ASSERT_EQ(item.map.total(item.count), static_cast<int>(live.size()));
    auto walk = item.walk();
    for (const int tile : live) {
      walk.advance();
      ASSERT_EQ(walk.tile, tile);
      for (int member = 0; member < 2; ++member) EXPECT_EQ(walk.takes(member), item.takes(member, tile)) << tile;
    }
    walk.advance();
    EXPECT_GE(walk.tile, item.count);
  }
}

// A warpgroup goes through its tiles run by run, and past those of the other one by one.
TEST_P(LiveTilesTest, RunsCoverAWarpgroupsTilesExactly) {
  std::mt19937 random(GetParam());
  for (const double density : {0.1, 0.5, 0.95, 1.0}) {
    const Item item = draw(random, GetParam(), density);
    const int live = item.map.total(item.count);
    for (int member = 0; member < 2; ++member) {
      std::vector<int> taken, wanted;
      for (int tile = 0; tile < item.count; ++tile) {
        if (item.takes(member, tile)) wanted.push_back(tile);
      }
      auto walk = item.walk();
      for (int i = 0; i < live;) {
        walk.advance();
        if (!walk.takes(member)) {
          ++i;
          continue;
        }
        const int first = walk.tile, length = walk.run(member);
        ASSERT_GT(length, 0);
        EXPECT_EQ(walk.tile, first + length - 1);
        for (int j = 0; j < length; ++j) taken.push_back(first + j);
        i += length;
      }
      EXPECT_EQ(taken, wanted) << "member " << member << ", density " << density;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Counts, LiveTilesTest, testing::Values(1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 160, 300));

}  // namespace
}  // namespace lla::cuda::sm90
