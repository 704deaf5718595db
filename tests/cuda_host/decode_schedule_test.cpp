// Which part of which row a decode block works on, on the CPU: every visible key of every row once, no slot twice, a
// row's parts in consecutive blocks; and whatever cu_seqlens_q and the lengths hold, nothing outside.
#include "cuda/sm90/decode/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "core/problem.hpp"
#include "cuda/sm90/decode/partials.hpp"

namespace lla::cuda::sm90::decode {
namespace {

struct Batch {
  std::vector<int32_t> lengths, first_key, cu_q;
  Shape shape{};

  Batch(std::vector<int32_t> keys, std::vector<int32_t> rows, int32_t heads, int32_t group) : lengths(std::move(keys)) {
    cu_q.push_back(0);
    for (const int32_t r : rows) cu_q.push_back(cu_q.back() + r);
    first_key.assign(lengths.size(), 0);
    shape.lengths = lengths.data(), shape.first_key = first_key.data(), shape.cu_q = cu_q.data();
    shape.max_length = 1 << 20;
    shape.batch = static_cast<int32_t>(lengths.size()), shape.heads_q = heads, shape.group = group;
    shape.seqlen_q = rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end());
    shape.total_q = cu_q.back();
    shape.left = -1, shape.right = 0, shape.most_rows = 32;
    shape.first_row = 0, shape.row_count = 1 << 30;
  }
};

// What find_start (walk.cuh) does with a warp, one sequence after the other.
Walk start_of(Shape p, int block, int wave, int& blocks) {
  p.wave = wave;
  int64_t total = 0;
  bool sharing = false;
  int32_t before = 0, claimed = 0;
  for (int32_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_at(p, b, claimed);
    sharing = sharing || shares_keys(p, s);
    total += int64_t{row_share(p, before, s.rows).count} * s.steps;
    before += s.rows;
    claimed = rows_claimed(p, claimed, b);
  }
  Walk walk{};
  const int64_t live = std::clamp<int64_t>(before - p.first_row, 0, p.row_count);
  blocks = blocks_for(p, total, live, sharing);
  if (block >= blocks) return walk;
  int64_t begin = share_begin(total, block, blocks);
  walk.left = share_begin(total, block + 1, blocks) - begin;
  walk.partial = p.invariant ? static_cast<int32_t>(begin) : block;
  for (int32_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequence_at(p, b, walk.claimed);
    const RowShare share = row_share(p, walk.before, s.rows);
    const int64_t length = int64_t{share.count} * s.steps;
    if (begin < length) {
      walk.batch = b;
      walk.row = share.skip + static_cast<int32_t>(begin / s.steps);
      walk.step = static_cast<int32_t>(begin % s.steps);
      return walk;
    }
    begin -= length;
    walk.before += s.rows;
    walk.numbered += decoded_rows(p, s);
    walk.claimed = rows_claimed(p, walk.claimed, b);
  }
  ADD_FAILURE() << "a share that no row has";
  return {};
}

// All units, by row of the launch; no two share a partial.
std::map<int, std::vector<Unit>> units_by_row(const Shape& p, int wave) {
  std::map<int, std::vector<Unit>> rows;
  std::set<int> partials;
  int blocks = 1;
  for (int block = 0; block < blocks; ++block) {
    Walk walk = start_of(p, block, wave, blocks);
    while (walk.left > 0) {
      const Unit u = take(p, walk);
      EXPECT_TRUE(partials.insert(u.partial).second) << "partial of row " << u.local << ", block " << block;
      rows[u.local].push_back(u);
    }
  }
  return rows;
}

void expect_every_key_once(const Batch& batch, int wave) {
  const Shape& p = batch.shape;
  auto rows = units_by_row(p, wave);
  int expected = 0;
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t lq = batch.cu_q[b + 1] - batch.cu_q[b];
    if (lq * p.group > p.most_rows) continue;
    for (int32_t h = 0; h < p.heads_q; ++h) {
      for (int32_t i = 0; i < lq; ++i, ++expected) {
        const auto& parts = rows[expected];
        ASSERT_FALSE(parts.empty()) << "row " << expected;
        const core::Mask mask{p.left, p.right};
        const core::Sequence s{b, 0, 0, lq, batch.lengths[b], batch.first_key[b]};
        const core::KeyRange want = core::visible_keys(mask, s, i, i);
        int64_t at = want.begin;
        for (size_t n = 0; n < parts.size(); ++n) {
          const Unit& u = parts[n];
          EXPECT_EQ(u.partial, parts[0].partial + static_cast<int>(n));
          EXPECT_EQ(u.first, n == 0);
          EXPECT_EQ(u.last, n + 1 == parts.size());
          EXPECT_EQ(u.batch, b);
          EXPECT_EQ(u.head, h);
          EXPECT_EQ(u.index, i);
          EXPECT_EQ(u.start % kAlign, 0);
          if (u.keys.end > u.keys.begin) {
            EXPECT_LE(u.start, u.keys.begin);
            EXPECT_EQ(u.keys.begin, at);
            at = u.keys.end;
          }
        }
        EXPECT_EQ(at, want.end) << "row " << expected;
      }
    }
  }
  EXPECT_EQ(static_cast<int>(rows.size()), expected);
}

// The rows of the bundles, one after the other, are the rows; a bundle's keys are exactly those that any of its rows
// sees, each of them once; and every row's own keys are its own.
void expect_bundles(const Batch& batch, int wave) {
  const Shape& p = batch.shape;
  const auto bundles = units_by_row(p, wave);
  std::set<std::tuple<int, int, int>> seen, wanted;  // sequence, head, query
  std::set<int> numbers;
  for (const auto& [local, parts] : bundles) {
    const Unit& u = parts[0];
    Keys all{1 << 30, 0};
    ASSERT_GE(u.rows, 1);
    ASSERT_LE(u.rows, p.bundle);
    for (int i = 0; i < u.rows; ++i) {
      const UnitRow row = row_of(p, u, i);
      const int32_t index = row.position - batch.cu_q[static_cast<size_t>(u.batch)];
      EXPECT_TRUE(seen.emplace(u.batch, row.head, index).second);
      EXPECT_EQ(row.head / p.group, u.kv_head);
      EXPECT_TRUE(numbers.insert(u.number + i).second);
      const int32_t lq = batch.cu_q[static_cast<size_t>(u.batch) + 1] - batch.cu_q[static_cast<size_t>(u.batch)];
      const core::Sequence s{u.batch,
                             0,
                             0,
                             lq,
                             batch.lengths[static_cast<size_t>(u.batch)],
                             batch.first_key[static_cast<size_t>(u.batch)]};
      const core::KeyRange want = core::visible_keys(core::Mask{p.left, p.right}, s, index, index);
      EXPECT_EQ(std::max(row.keys.end - row.keys.begin, 0), std::max<int64_t>(want.end - want.begin, 0));
      if (want.end > want.begin) {
        EXPECT_EQ(row.keys.begin, want.begin);
        all = {std::min(all.begin, row.keys.begin), std::max(all.end, row.keys.end)};
      }
    }
    int32_t at = parts[0].row.begin;
    EXPECT_LE(at, all.begin);
    for (size_t n = 0; n < parts.size(); ++n) {
      const Unit& part = parts[n];
      EXPECT_EQ(part.partial, parts[0].partial + static_cast<int>(n));
      EXPECT_EQ(part.first, n == 0);
      EXPECT_EQ(part.last, n + 1 == parts.size());
      EXPECT_EQ(part.start % kAlign, 0);
      if (part.keys.end > part.keys.begin) {
        EXPECT_EQ(part.keys.begin, at);
        at = part.keys.end;
      }
    }
    EXPECT_GE(at, all.end) << "bundle " << local;
  }
  for (int32_t b = 0; b < p.batch; ++b) {
    const int32_t lq = batch.cu_q[static_cast<size_t>(b) + 1] - batch.cu_q[static_cast<size_t>(b)];
    if (lq * p.group > p.most_rows) continue;
    for (int32_t h = 0; h < p.heads_q; ++h) {
      for (int32_t i = 0; i < lq; ++i) wanted.emplace(b, h, i);
    }
  }
  EXPECT_EQ(seen, wanted);
  EXPECT_EQ(numbers.size(), wanted.size());
  if (!numbers.empty()) {
    EXPECT_EQ(*numbers.begin(), 0);
    EXPECT_EQ(*numbers.rbegin() + 1, static_cast<int>(wanted.size()));
  }
}

TEST(DecodeSchedule, BundlesOfRows) {
  std::mt19937 random(11);
  const auto draw = [&](int n) { return static_cast<int32_t>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 300; ++round) {
    const int n = 1 + draw(40), group = 1 << draw(6);
    std::vector<int32_t> keys, rows;
    for (int b = 0; b < n; ++b)
      keys.push_back(draw(draw(4) == 0 ? 6000 : 300)), rows.push_back(std::min(draw(7), keys.back()));
    Batch batch(keys, rows, 2 * group, group);
    batch.shape.bundle = 1 << draw(4);
    batch.shape.invariant = draw(2) == 1;
    batch.shape.left = draw(2) == 0 ? -1 : draw(400);
    batch.shape.right = draw(3) - 1;
    for (int b = 0; b < n; ++b) batch.first_key[static_cast<size_t>(b)] = draw(3) == 0 ? draw(500) : 0;
    expect_bundles(batch, 1 + draw(140));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(DecodeSchedule, EveryKeyOfEveryRowOnce) {
  for (const int blocks : {1, 7, 132}) {
    expect_every_key_once(Batch({65536}, {1}, 8, 1), blocks);
    expect_every_key_once(Batch(std::vector<int32_t>(32, 1000), std::vector<int32_t>(32, 1), 8, 1), blocks);
    expect_every_key_once(Batch({1, 0, 129, 5000, 128, 127}, {1, 1, 3, 1, 0, 2}, 4, 2), blocks);
    expect_every_key_once(Batch({300, 4000, 20}, {1, 512, 1}, 8, 1), blocks);  // one is left to the forward
  }
}

TEST(DecodeSchedule, WindowsPaddingAndRandomBatches) {
  std::mt19937 random(7);
  const auto draw = [&](int n) { return static_cast<int32_t>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 200; ++round) {
    const int n = 1 + draw(70);
    std::vector<int32_t> keys, rows;
    for (int b = 0; b < n; ++b)
      keys.push_back(draw(draw(4) == 0 ? 6000 : 300)), rows.push_back(std::min(draw(5), keys.back()));
    Batch batch(keys, rows, 2, 2);
    batch.shape.left = draw(2) == 0 ? -1 : draw(400);
    batch.shape.right = draw(3) - 1;
    for (int b = 0; b < n; ++b) batch.first_key[static_cast<size_t>(b)] = draw(3) == 0 ? draw(500) : 0;
    batch.shape.invariant = round % 2 == 1;
    expect_every_key_once(batch, 1 + draw(140));
    if (testing::Test::HasFailure()) return;
  }
}

// A row's place on the line is as long as the longest row of its sequence, or a tile longer, whatever the window; and
// where its last step begins can be counted, up to the longest cache there may be.
TEST(DecodeSchedule, ALineNoLongerThanItsRows) {
  std::mt19937 random(17);
  const auto draw = [&](int64_t low, int64_t high) {
    return static_cast<int32_t>(std::uniform_int_distribution<int64_t>(low, high)(random));
  };
  for (int turn = 0; turn < 20000; ++turn) {
    const int32_t most = draw(0, 1) == 0 ? 2000 : std::numeric_limits<int32_t>::max() - 1024;
    Batch batch({draw(0, 1) == 0 ? most - draw(0, 300) : draw(0, most)}, {draw(1, 32)}, 1, 1);
    Shape& p = batch.shape;
    p.max_length = most, p.invariant = draw(0, 1) == 1;
    p.left = draw(-1, draw(0, 1) == 0 ? 300 : most), p.right = draw(-1, draw(0, 1) == 0 ? 40 : most);
    batch.first_key[0] = draw(0, 1) == 0 ? 0 : draw(0, batch.lengths[0]);
    const Sequence s = sequence_at(p, 0, 0);
    int32_t longest = 0;
    for (int32_t i = 0; i < s.length_q; ++i) {
      const Keys keys = keys_of(p, s, i);
      longest = std::max(longest, keys.end - aligned(keys.begin));
      EXPECT_LE(int64_t{aligned(keys.begin)} + int64_t{s.steps - 1} * s.step * kGranule,
                std::numeric_limits<int32_t>::max());
    }
    EXPECT_GE(int64_t{s.granules} * kGranule, longest);
    EXPECT_LE(s.granules, std::max<int64_t>(1, (int64_t{longest} + kAlign + kGranule - 1) / kGranule))
        << "window " << p.left << ", " << p.right << ", length " << s.length;
    if (HasFailure()) return;
  }
}

// options.batch_invariant: the parts of a row are a matter of its own length, and there is room for all of them.
TEST(DecodeSchedule, CutByTheirOwnLengthsAlone) {
  const auto cuts = [](Batch batch, int32_t sequence, int wave) {
    batch.shape.invariant = true;
    std::map<std::pair<int, int>, std::vector<std::pair<int, int>>>
        out;  // of a head and query: begin and end of each part
    int blocks = 1;
    for (int block = 0; block < blocks; ++block) {
      for (Walk walk = start_of(batch.shape, block, wave, blocks); walk.left > 0;) {
        const Unit u = take(batch.shape, walk);
        if (u.batch == sequence) out[{u.head, u.index}].emplace_back(u.keys.begin, u.keys.end);
      }
    }
    return out;
  };
  const std::map<int32_t, size_t> parts{{1, 1}, {130, 1}, {1024, 1}, {5000, 3}, {16384, 4}, {65536, 16}};
  for (const auto& [length, count] : parts) {
    const auto alone = cuts(Batch({length}, {1}, 8, 1), 0, 132);
    EXPECT_EQ(alone, cuts(Batch({300, length, 70000}, {2, 1, 1}, 8, 1), 1, 132)) << length;
    EXPECT_EQ(alone, cuts(Batch({9000, 1, 2, length}, {1, 1, 1, 1}, 8, 1), 3, 7)) << length;
    EXPECT_EQ(alone.at({0, 0}).size(), count) << length;
  }
  int32_t most = 0;
  for (int32_t granules = 1; granules < 600000; granules += granules < 5000 ? 1 : 37) {
    const int32_t piece = piece_granules(granules);
    most = std::max(most, (granules + piece - 1) / piece);
    ASSERT_LE(most, most_pieces(granules)) << granules;
    ASSERT_LE(most, kMostBlocks);
  }
}

// Rows in several launches are the same rows.
TEST(DecodeSchedule, RowsInSeveralLaunches) {
  Batch batch(std::vector<int32_t>(9, 700), std::vector<int32_t>(9, 1), 8, 1);
  std::set<std::pair<int, int>> seen;
  for (int first = 0; first < 72; first += 20) {
    batch.shape.first_row = first, batch.shape.row_count = std::min(20, 72 - first);
    for (int block = 0; block < 132; ++block) {
      int blocks = 0;
      Walk walk = start_of(batch.shape, block, 132, blocks);
      while (walk.left > 0) {
        const Unit u = take(batch.shape, walk);
        EXPECT_GE(u.local, 0);
        EXPECT_LT(u.local, batch.shape.row_count);
        if (u.first) {
          EXPECT_TRUE(seen.emplace(u.batch, u.head).second);
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 72u);
}

TEST(DecodeSchedule, WhateverTheDeviceReads) {
  Batch batch({100, 100, 100, 100}, {1, 1, 1, 1}, 2, 1);
  batch.lengths[1] = batch.shape.max_length + 1;
  batch.lengths[2] = -7;
  EXPECT_TRUE(sequence_at(batch.shape, 1, 1).invalid);
  EXPECT_TRUE(sequence_at(batch.shape, 2, 2).invalid);
  EXPECT_EQ(sequence_at(batch.shape, 1, 1).length, 0);  // nothing of it is read
  batch.cu_q = {0, 3, 1, 900, 4};
  batch.shape.cu_q = batch.cu_q.data();
  int32_t claimed = 0, rows = 0;
  for (int32_t b = 0; b < 4; ++b) {  // every row up to the largest entry is somebody's, none outside
    const Sequence s = sequence_at(batch.shape, b, claimed);
    EXPECT_EQ(s.start_q, rows);
    rows += s.length_q;
    claimed = rows_claimed(batch.shape, claimed, b);
  }
  EXPECT_EQ(rows, batch.shape.total_q);
}

// A sequence that breaks a bound takes the place of the nearest that keeps it, without a key: the units of the others
// are the same.
TEST(DecodeSchedule, AnInvalidSequenceLeavesTheOthersTheirParts) {
  struct Case {
    int32_t length, first_key, nearest;
  };
  for (const int32_t bundle : {1, 4}) {
    for (const bool invariant : {false, true}) {
      for (const Case c : {Case{9001, 0, 9000}, {1 << 30, 0, 9000}, {-3, 0, 0}, {5000, -2, 5000}}) {
        Batch usable({3000, c.nearest, 7000, 1500}, {1, 2, 1, 3}, 8, 4), broken = usable;
        broken.lengths[1] = c.length, broken.first_key[1] = c.first_key;
        for (Batch* batch : {&usable, &broken}) {
          Shape& shape = batch->shape;
          shape.lengths = batch->lengths.data(), shape.first_key = batch->first_key.data();
          shape.cu_q = batch->cu_q.data();
          shape.max_length = 9000, shape.bundle = bundle, shape.invariant = invariant;
        }
        const auto want = units_by_row(usable.shape, 132), got = units_by_row(broken.shape, 132);
        ASSERT_EQ(want.size(), got.size());
        for (const auto& [row, units] : want) {
          const std::vector<Unit>& other = got.at(row);
          ASSERT_EQ(units.size(), other.size()) << "row " << row;
          for (size_t i = 0; i < units.size(); ++i) {
            const Unit &u = units[i], &v = other[i];
            EXPECT_EQ(std::tuple(u.batch, u.head, u.index, u.partial, u.first, u.last),
                      std::tuple(v.batch, v.head, v.index, v.partial, v.first, v.last));
            EXPECT_EQ(v.invalid, v.batch == 1);
            if (v.invalid) {
              EXPECT_EQ(v.keys.begin, v.keys.end);
              EXPECT_EQ(v.row.begin, v.row.end);
              EXPECT_EQ(v.sequence.begin, v.sequence.end);
              for (int32_t r = 0; r < v.rows; ++r) {
                const Keys keys = row_of(broken.shape, v, r).keys;
                EXPECT_EQ(keys.begin, keys.end);
              }
            } else {
              EXPECT_EQ(std::tuple(u.keys.begin, u.keys.end, u.start, u.row.begin, u.row.end),
                        std::tuple(v.keys.begin, v.keys.end, v.start, v.row.begin, v.row.end));
            }
          }
        }
      }
    }
  }
}

TEST(DecodeSchedule, TheWorkspaceDoesNotGrowWithTheCache) {
  EXPECT_EQ(Layout(256, 128, Form::solved, 132, false).rows_at_once, 256);
  EXPECT_EQ(Layout(2048, 64, Form::solved, 132, false, 0, true).rows_at_once, 1188) << "two launches for six";
  EXPECT_EQ(Layout(2048, 128, Form::solved, 132, false, 0, true).rows_at_once, 264) << "no wave of solves half full";
  EXPECT_LE(Layout(256, 64, Form::given_x, 132, false).size, 1 << 20);
  EXPECT_LE(Layout(256, 64, Form::bundles, 132, false).size, 3 << 20) << "up to 2,048 rows";
  for (const int dim : {64, 128}) {
    for (const Form form : {Form::solved, Form::given_x, Form::bundles, Form::moments}) {
      for (const int64_t rows : {1, 8, 200, 300, 400, 1024, 2048, 100000}) {
        for (const bool sharing : {false, true}) {
          const Layout layout(rows, dim, form, 132, sharing);
          EXPECT_LE(layout.size, (int64_t{64} << 20) + (int64_t{3} << 20)) << rows << " rows, " << sharing;
          EXPECT_GE(layout.rows_at_once, 1);
          EXPECT_EQ(layout.blocks % 132, 0);
          EXPECT_EQ(layout.rows_at_once, Layout(rows, dim, form, 132, !sharing).rows_at_once);
          if (sharing) {
            EXPECT_GE(layout.blocks, layout.rows_at_once);
          }
          if (!sharing) {
            const Layout alone(rows, dim, form, 132, false, 0, true);
            const auto launches = [&](const Layout& l) { return (rows + l.rows_at_once - 1) / l.rows_at_once; };
            EXPECT_LE(launches(alone), launches(layout)) << rows << " rows, dim " << dim;
            EXPECT_LE(alone.size, (int64_t{64} << 20) + (int64_t{3} << 20)) << rows << " rows, dim " << dim;
            EXPECT_EQ(alone.blocks, layout.blocks);
            const int wave = form == Form::solved ? 132 * solves_at_once(dim) : wave_of(form, 132);
            EXPECT_TRUE(alone.rows_at_once == rows || alone.rows_at_once % wave == 0) << alone.rows_at_once;
            if (launches(alone) > 1) {  // the last has about as many as the others
              EXPECT_GE(rows % alone.rows_at_once == 0 ? alone.rows_at_once : rows % alone.rows_at_once,
                        alone.rows_at_once - launches(alone) * wave);
            }
          }
          const Layout cut(rows, dim, form, 132, sharing, 16);
          EXPECT_LE(cut.size, int64_t{129} << 20);
          EXPECT_TRUE(cut.rows_at_once == rows || cut.rows_at_once * 16 % 132 == 0) << cut.rows_at_once;
          if (leaves_matrices(form)) {
            EXPECT_LE(layout.blocks, kMostBlocks);
          }
        }
      }
    }
  }
}

// Whatever the device reads, also sequences that claim more rows than the host's bound of them: no share for a block
// that the host has not launched, and no partial behind the workspace's.
TEST(DecodeSchedule, NoMoreBlocksThanAreLaunched) {
  std::mt19937 random(3);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int turn = 0; turn < 400; ++turn) {
    const int32_t n = draw(1, 70), group = 1 << draw(0, 3);
    std::vector<int32_t> keys, rows;
    for (int32_t b = 0; b < n; ++b) keys.push_back(draw(0, 2000)), rows.push_back(draw(0, 7) > 0 ? 1 : draw(0, 9));
    Batch batch(keys, rows, 8 * group, group);
    Shape& p = batch.shape;
    p.seqlen_q = draw(1, 9);
    p.most_rows = draw(0, 1) == 0 ? 32 : std::numeric_limits<int32_t>::max();
    p.invariant = draw(0, 1) == 1, p.max_length = 2000;
    const int dim = draw(1, 2) * 64, multiprocessors = draw(0, 3) == 0 ? draw(1, 256) : 132;
    const Form form = std::array{Form::solved, Form::moments, Form::bundles}[static_cast<size_t>(draw(0, 2))];
    p.bundle = bundle_of(form, dim);
    const int64_t pieces = p.invariant ? most_pieces((p.max_length + kGranule - 1) / kGranule) : 0;
    int32_t claimed = 0;
    int64_t all = 0;
    for (int32_t b = 0; b < n; claimed = rows_claimed(p, claimed, b), ++b) all += sequence_at(p, b, claimed).rows;
    if (all == 0) continue;
    const Layout layout(all, dim, form, multiprocessors, p.seqlen_q * group > p.bundle, pieces);
    const int64_t room = layout.records / partial_bytes(form, dim);
    for (int64_t first = 0; first < all; first += layout.rows_at_once) {
      p.first_row = static_cast<int32_t>(first);
      p.row_count = static_cast<int32_t>(std::min<int64_t>(all - first, layout.rows_at_once));
      int blocks = 1;
      for (int block = 0; block < blocks; ++block) {
        for (Walk walk = start_of(p, block, wave_of(form, multiprocessors), blocks); walk.left > 0;) {
          const Unit u = take(p, walk);
          ASSERT_LT(u.partial, room) << "turn " << turn;
          ASSERT_LT(u.local, p.row_count) << "turn " << turn;
        }
        ASSERT_LE(blocks, layout.blocks) << "turn " << turn;
      }
    }
  }
}

// Rows of a group have blocks of their own, whatever the host's bound of rows was.
TEST(DecodeSchedule, RowsThatShareKeysRunAtTheSameTime) {
  const Batch batch(std::vector<int32_t>(8, 4096), std::vector<int32_t>(8, 1), 32, 4);
  int blocks = 0;
  std::set<int> rows;
  for (int block = 0; block < 256; ++block) {
    Walk walk = start_of(batch.shape, block, 132, blocks);
    ASSERT_GT(walk.left, 0);
    rows.insert(take(batch.shape, walk).local);
    EXPECT_EQ(walk.left, 0);
  }
  EXPECT_EQ(blocks, 256);
  EXPECT_EQ(rows.size(), 256u);
}

// Equally long rows: no block has the end of one and the beginning of another.
TEST(DecodeSchedule, EvenSharesOfEqualRows) {
  const auto units_of = [](const Batch& batch, int block) {
    int units = 0, blocks = 0;
    for (Walk walk = start_of(batch.shape, block, 132, blocks); walk.left > 0; ++units) (void)take(batch.shape, walk);
    return units;
  };
  const Batch many(std::vector<int32_t>(32, 4096), std::vector<int32_t>(32, 1), 8, 1), one({65536}, {1}, 8, 1);
  for (int block = 0; block < 132; ++block) {
    EXPECT_LE(units_of(many, block), 2);
    EXPECT_LE(units_of(one, block), 1);
  }
}

// Where queries are dense, the sequences of a launch and what comes before them without looking at any.
TEST(DecodeSchedule, DenseSequencesOfALaunch) {
  std::mt19937 random(20261118);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int turn = 0; turn < 200; ++turn) {
    std::vector<int32_t> lengths(draw(1, 70));
    for (int32_t& n : lengths) n = draw(-1, 5000);
    const int32_t group = draw(1, 3), key_heads = draw(1, 5);
    Batch batch(lengths, {}, group * key_heads, group);
    Shape& p = batch.shape;
    p.cu_q = nullptr, p.seqlen_q = draw(0, 12), p.max_length = 4000;
    p.bundle = draw(0, 1) == 0 ? 1 : draw(2, 8), p.invariant = draw(0, 1) == 1;
    const int32_t each = rows_of_each(p);
    p.first_row = draw(0, std::max(1, each * p.batch)), p.row_count = draw(0, each * p.batch);
    const SequenceRange range = sequences_of(p, each);
    for (int32_t b = 0; b < p.batch; ++b) {
      const Sequence s = sequence_at(p, b, 0);
      EXPECT_EQ(s.rows, each);
      EXPECT_EQ(decoded_rows(p, s), each > 0 ? p.seqlen_q * p.heads_q : 0);
      EXPECT_EQ(row_share(p, each * b, s.rows).count > 0, b >= range.begin && b < range.end) << "sequence " << b;
    }
  }
}

TEST(DecodeSchedule, QuotientsOfAnySize) {
  for (const int64_t a : {int64_t{0}, int64_t{1}, int64_t{131}, int64_t{1} << 31, (int64_t{1} << 32) - 1,
                          int64_t{1} << 32, (int64_t{1} << 45) + 12345}) {
    for (const int64_t b : {int64_t{1}, int64_t{7}, int64_t{132}, (int64_t{1} << 32) - 1, int64_t{1} << 33}) {
      EXPECT_EQ(quotient(a, b), a / b);
    }
  }
}

// Clusters put the parts of few rows together: of eight blocks at head dimension 128 fifteen run at once on an H200, so
// that the 32 rows of a small batch are left to blocks of their own.
TEST(DecodeSchedule, FewRowsArePutTogetherInClusters) {
  EXPECT_EQ(few_rows(132, 128), 28);
  EXPECT_EQ(few_rows(132, 64), 33);
  EXPECT_LE(few_rows(6, 128), 1);
}

}  // namespace
}  // namespace lla::cuda::sm90::decode
