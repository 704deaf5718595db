// The walk through live tiles against a plain list of them.
#include "cuda/tensor/live_tiles.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace lla::cuda::sm90 {
namespace {

constexpr int kWords = 4;  // 128 tiles have bits

struct Item {
  LiveTiles<kWords> map{};
  int count;

  LiveWalk<kWords, Alone> walk() const { return {&map, count}; }
  std::vector<int> live() const {
    std::vector<int> tiles;
    for (int tile = 0; tile < count; ++tile) {
      if (tile >= kWords * 32 || ((map.bits[tile / 32] >> (tile % 32)) & 1)) tiles.push_back(tile);
    }
    return tiles;
  }
};

Item draw(std::mt19937& random, int count, double density) {
  Item item;
  item.count = count;
  std::bernoulli_distribution alive(density);
  for (int tile = 0; tile < std::min(count, kWords * 32); ++tile) {
    if (alive(random)) item.map.bits[tile / 32] |= 1u << (tile % 32);
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
    }
    walk.advance();
    EXPECT_GE(walk.tile, item.count);
  }
}

TEST_P(LiveTilesTest, RunsCoverTheLiveTilesExactly) {
  std::mt19937 random(GetParam());
  for (const double density : {0.1, 0.5, 0.95, 1.0}) {
    const Item item = draw(random, GetParam(), density);
    const std::vector<int> live = item.live();
    std::vector<int> taken;
    auto walk = item.walk();
    while (taken.size() < live.size()) {
      walk.advance();
      const int first = walk.tile, length = walk.run();
      ASSERT_GT(length, 0);
      EXPECT_EQ(walk.tile, first + length - 1);
      for (int j = 0; j < length; ++j) taken.push_back(first + j);
    }
    EXPECT_EQ(taken, live) << "density " << density;
  }
}

INSTANTIATE_TEST_SUITE_P(Counts, LiveTilesTest, testing::Values(1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 160, 300));

}  // namespace
}  // namespace lla::cuda::sm90
