// Where the Hopper forward copies the keys of a cache to, on the CPU: every key some row sees has a place of its own
// within the bound, the kernels' masks over the copies are those of the problem, each sequence is taken by decode or by
// the forward and never by both, and whatever lengths and cu_seqlens_q hold, nothing lies outside.
#include "cuda/tensor/cache/places.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/sm90/decode/schedule.hpp"
#include "cuda/sm90/plan.hpp"

namespace lla::cuda::sm90 {
namespace {

struct Batch {
  std::vector<int32_t> lengths, first_key, cu_q = {0};
  core::Problem p;

  Batch(std::vector<int32_t> keys, const std::vector<int32_t>& rows, int64_t heads, int64_t group)
      : lengths(std::move(keys)), first_key(lengths.size(), 0) {
    for (const int32_t r : rows) cu_q.push_back(cu_q.back() + r);
    p.device = core::Device::cuda;
    p.dtype = p.out_dtype = DType::bf16;
    p.cache = p.packed = true;
    p.batch = static_cast<int64_t>(lengths.size());
    p.seqlen_q = rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end());
    p.seqlen_k = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    p.total_q = cu_q.back(), p.total_k = p.batch * p.seqlen_k;
    p.heads_q = heads * group, p.heads_kv = heads;
    p.dim = p.value_dim = 64;
    p.mask = {-1, 0};
  }
  core::KeyCache cache() const {
    core::KeyCache c;
    c.lengths = lengths.data(), c.first_key = first_key.data(), c.max_length = p.seqlen_k;
    return c;
  }

  // What places_kernel does with a block, one sequence after the other.
  std::vector<SequencePlace> places() const {
    const SequenceSource source{p, cache(), cu_q.data(), nullptr, most_own_keys(p)};
    std::vector<SequencePlace> out;
    int64_t claimed = 0, keys = 0, chunks = 0;
    for (int32_t b = 0; b < p.batch; ++b) {
      SequencePlace place = find_place(source, b, claimed);
      claimed = std::max(claimed, source.claimed(b));
      keys += place.keys;
      const int64_t before = chunks;
      chunks += place.chunks;
      settle_place(place, before, keys, source.most_keys);
      out.push_back(place);
    }
    return out;
  }
  // Whether decode works on the sequence.
  bool decoded(int32_t b) const {
    decode::Shape s{};
    s.lengths = lengths.data(), s.first_key = first_key.data(), s.cu_q = cu_q.data();
    s.max_length = static_cast<int32_t>(p.seqlen_k);
    s.batch = static_cast<int32_t>(p.batch), s.heads_q = static_cast<int32_t>(p.heads_q);
    s.group = static_cast<int32_t>(p.group());
    s.seqlen_q = static_cast<int32_t>(p.seqlen_q), s.total_q = static_cast<int32_t>(p.total_q);
    s.left = static_cast<int32_t>(p.mask.left), s.right = static_cast<int32_t>(p.mask.right);
    s.most_rows = static_cast<int32_t>(most_rows(p));
    int32_t claimed = 0;
    for (int32_t i = 0; i < b; ++i) claimed = decode::rows_claimed(s, claimed, i);
    return decode::sequence_at(s, b, claimed).rows > 0;
  }
};

Batch drawn(std::mt19937& random) {
  const auto between = [&](int64_t low, int64_t high) {
    return static_cast<int32_t>(low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1)));
  };
  std::vector<int32_t> lengths, rows;
  for (int n = between(1, 12); n > 0; --n) {
    rows.push_back(random() % 3 ? between(0, 5) : between(0, 200));
    lengths.push_back(random() % 6 ? between(0, 2000) : between(0, 3));
  }
  Batch batch(lengths, rows, between(1, 3), between(1, 4));
  for (size_t b = 0; b < lengths.size(); ++b) {
    if (random() % 3 == 0) batch.first_key[b] = between(0, lengths[b] + 3);
  }
  if (random() % 2) batch.p.mask.left = between(0, 500);
  if (random() % 3 == 0) batch.p.mask.right = random() % 2 ? -1 : between(0, 50);
  return batch;
}

TEST(CachePlaces, EveryVisibleKeyHasAPlaceOfItsOwn) {
  std::mt19937 random(1);
  int taken = 0;
  for (int round = 0; round < 500; ++round) {
    const Batch batch = drawn(random);
    const std::vector<SequencePlace> places = batch.places();
    int64_t next = 0;
    for (int32_t b = 0; b < batch.p.batch; ++b) {
      const SequencePlace& place = places[static_cast<size_t>(b)];
      const int32_t rows = batch.cu_q[static_cast<size_t>(b) + 1] - batch.cu_q[static_cast<size_t>(b)];
      ASSERT_NE(place.state, kInvalid);
      ASSERT_EQ(place.state == kTaken, rows > 0 && !batch.decoded(b)) << "one part and one only";
      const SequenceSpans spans = spans_of(place, true), none = spans_of(place, false);
      EXPECT_EQ(none.rows[0], none.rows[1]);
      if (place.state != kTaken) {
        EXPECT_EQ(spans.rows[0], spans.rows[1]);
        continue;
      }
      ++taken;
      EXPECT_EQ(place.first_chunk, next);
      next += place.chunks;
      EXPECT_EQ(spans.keys[0] % kPrepassRows, 0);
      EXPECT_LE(spans.keys[1], next * kPrepassRows);
      // The kernels' mask over the copies is the problem's over the cache.
      Shape shape = shape_of(batch.p);
      QueryBlock block{};
      block.length_q = spans.rows[1] - spans.rows[0], block.length_k = spans.keys[1] - spans.keys[0];
      ASSERT_EQ(block.length_q, rows);
      const core::Sequence s = core::sequence(batch.p, batch.cu_q.data(), batch.cache(), b, spans.rows[0]);
      for (int32_t i = 0; i < rows; ++i) {
        const core::KeyRange want = core::visible_keys(batch.p.mask, s, i, i);
        const KeyRange got = visible_keys(shape, block, i);
        if (want.begin == want.end) {
          EXPECT_LE(got.end, got.begin);
        } else {
          EXPECT_EQ(got.begin + place.first_key, want.begin);
          EXPECT_EQ(got.end + place.first_key, want.end);
        }
      }
    }
    EXPECT_LE((next + 1) * kPrepassRows, own_positions(batch.p)) << "and one part behind them";
  }
  EXPECT_GT(taken, 500);
}

TEST(CachePlaces, BoundOfAllKeys) {
  Batch batch({300, 5000, 700, 160, 100}, {150, 1, 160, 140, 170}, 2, 1);
  batch.p.total_k = 300 + 700 + 160;
  const std::vector<SequencePlace> places = batch.places();
  for (const size_t b : {0, 2, 3}) EXPECT_EQ(places[b].state, kTaken) << b;
  EXPECT_EQ(places[1].state, kNotTaken) << "decodes: its keys do not count";
  EXPECT_EQ(places[4].state, kInvalid);
  EXPECT_EQ(places[4].length_q, 170) << "its rows are written all the same";
  batch.p.total_k = 0;
  batch.lengths[0] = 0;
  EXPECT_EQ(batch.places()[0].state, kTaken) << "no keys are within every bound";
}

TEST(CachePlaces, NothingOutsideWhateverTheDeviceReads) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    Batch batch = drawn(random);
    for (int32_t& n : batch.lengths) n = random() % 4 ? n : static_cast<int32_t>(random());
    for (int32_t& n : batch.cu_q) n = random() % 4 ? n : static_cast<int32_t>(random() % 1000) - 200;
    for (int32_t& n : batch.first_key) n = random() % 4 ? n : static_cast<int32_t>(random());
    int64_t rows = 0;
    for (const SequencePlace& place : batch.places()) {
      const SequenceSpans spans = spans_of(place, true);
      EXPECT_GE(place.start_q, rows);
      EXPECT_GE(place.length_q, 0);
      rows = place.start_q + place.length_q;
      if (place.state != kTaken) continue;
      EXPECT_GE(place.first_key, 0);
      EXPECT_LE(int64_t{place.first_key} + place.keys, batch.p.seqlen_k);
      EXPECT_LE(place.length_q, batch.p.seqlen_q);
      EXPECT_LE(spans.keys[1], own_positions(batch.p) - kPrepassRows);
    }
    EXPECT_LE(rows, batch.p.total_q);
  }
}

TEST(CachePlaces, PackedKeys) {
  const std::vector<int32_t> cu = {0, 100, 100, 400};
  core::Problem p;
  p.packed = p.batch_invariant = true;
  p.batch = 3, p.heads_q = p.heads_kv = 2, p.seqlen_q = p.seqlen_k = 300, p.total_q = p.total_k = 400;
  p.mask = {-1, 0};
  const SequenceSource source{p, {}, cu.data(), cu.data(), most_own_keys(p)};
  const SequencePlace last = find_place(source, 2, 0);
  EXPECT_EQ(last.state, kTaken);
  EXPECT_EQ(last.start_q, 100);
  EXPECT_EQ(last.first_key, 100);
  EXPECT_EQ(last.keys, 300);
  EXPECT_EQ(find_place(source, 1, 0).state, kNotTaken) << "has no rows";
  EXPECT_EQ(find_place(source, 0, 0).state, kTaken);
}

}  // namespace
}  // namespace lla::cuda::sm90
