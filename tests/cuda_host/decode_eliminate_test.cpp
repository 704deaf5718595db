// The elimination of the Hopper decode's solve on the CPU, step by step and by threads, against fp64; what no step has
// written is NaN.
#include "cuda/sm90/decode/eliminate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "decode_system.hpp"

namespace lla::cuda::sm90::decode {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A warp's products as its tensor cores make them: of each number eleven digits, sums cut off at 24 of the largest term.
// Operands are read by the rows that lanes name to `ldmatrix`, eight for each register: element (i, k) of the left one is
// in register i / 8 + 2 (k / 4) of a lane, (k, j) of the right one in register k / 4. (The part is chosen before it is
// indexed: of (c ? a : b)[k % 4] g++ 12 with -fsanitize=shift computes the index in one of the two branches only.)
struct Products {
  static float eleven_digits(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffffe000u); }
  struct Left {
    const float *leading, *rest;
    unsigned row;

    float at(unsigned i, unsigned k, bool of_rest) const {
      const unsigned lane = 8 * (i / 8 + 2 * (k / 4)) + i % 8;
      const float* const part = of_rest ? rest : leading;
      return eleven_digits(part[kPanel * row + Operand<64>::left_place(lane) + k % 4]);
    }
  };
  struct Right {
    const float *leading, *rest;
    unsigned row;

    float at(unsigned j, unsigned k, bool of_rest) const {
      const unsigned lane = 8 * (k / 4 + (of_rest ? 2 : 0)) + j;
      const float* const part = lane < 16 ? leading : rest;
      return eleven_digits(part[kPanel * row + Operand<64>::right_place(lane) + k % 4]);
    }
  };
  template <int kDim>
  constexpr Left left(const Operand<kDim>& l, unsigned row, unsigned) const {
    return {l.leading, l.rest, row};
  }
  template <int kDim>
  constexpr Right right(const Operand<kDim>& u, unsigned row, unsigned) const {
    return {u.leading, u.rest, row};
  }
  static float cut_off(double sum, double largest) {
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
    return static_cast<float>(std::trunc(sum / unit) * unit);
  }
  void take_off(float (&from)[4], float (&from_next)[4], const Left& l, const Left& l_next, const Right& u,
                unsigned lane) const {
    take_off(from, l, u, lane), take_off(from_next, l_next, u, lane);
  }
  static void take_off(float (&from)[4], const Left& l, const Right& u, unsigned lane) {
    for (unsigned e = 0; e < 4; ++e) {
      float product = 0;
      for (const auto& [left_rest, right_rest] : {std::pair{true, false}, {false, true}, {false, false}}) {
        double sum = product, largest = std::abs(product);
        for (unsigned k = 0; k < kPanel; ++k) {
          const double term =
              double{l.at(lane / 4 + e / 2 * 8, k, left_rest)} * double{u.at(lane % 4 * 2 + e % 2, k, right_rest)};
          sum += term, largest = std::max(largest, std::abs(term));
        }
        product = largest > 0 ? cut_off(sum, largest) : static_cast<float>(sum);
      }
      from[e] -= product;
    }
  }
};

// The kernel's two barriers. They order what came before an arrival with what comes after a wait and nothing else, so
// that ThreadSanitizer, which follows that through other threads, sees every race. A panel has a count of its own; the
// kernel has one for all, so nobody may arrive for a panel before all have for the one before it.
template <int kDim>
struct Barriers {
  static constexpr int kAtPublished = Elimination<kDim>::kAtPublished, kAtEliminated = Elimination<kDim>::kAtEliminated;
  mutable std::atomic<int> at_published[kDim / kPanel] = {}, at_eliminated[kDim / kPanel] = {};
  mutable std::atomic<bool> overtaken = false;

  void published(unsigned panel) const { arrive(at_published, panel, kAtPublished); }
  void eliminated(unsigned panel) const { arrive(at_eliminated, panel, kAtEliminated); }
  void wait_published(unsigned panel) const { published(panel), wait(at_published[panel], kAtPublished); }
  void wait_eliminated(unsigned panel) const { eliminated(panel), wait(at_eliminated[panel], kAtEliminated); }

 private:
  void arrive(std::atomic<int>* counts, unsigned panel, int all) const {
    if (panel > 0 && counts[panel - 1].load(std::memory_order_relaxed) != all) overtaken = true;
    if (counts[panel].fetch_add(1, std::memory_order_release) + 1 == all) counts[panel].notify_all();
  }
  static void wait(const std::atomic<int>& count, int all) {
    for (int n; (n = count.load(std::memory_order_acquire)) != all;) count.wait(n, std::memory_order_acquire);
  }
};

template <int kDim>
struct Eliminated : System<kDim> {
  using System<kDim>::System, System<kDim>::a, System<kDim>::b;
  std::unique_ptr<Matrix<kDim>> m = std::make_unique<Matrix<kDim>>();

  void prepare(float limit) {
    std::fill_n(reinterpret_cast<float*>(m.get()), sizeof(*m) / sizeof(float), kNan);
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j <= i; ++j) m->at(i, j) = static_cast<float>(a[i * kDim + j]);
      m->rhs[i] = static_cast<float>(b[i]);
      m->start[i] = m->at(i, i);
      m->limit[i] = limit * m->start[i];
    }
  }

  // x of the elimination, step by step up to the back substitution.
  std::vector<double> solve(float limit) {
    prepare(limit);
    std::vector<RowElimination<kDim>> rows;
    std::vector<Tiles<kDim>> tiles;
    for (unsigned t = 0; t < kDim; ++t) rows.emplace_back(*m, t);
    for (unsigned t = 0; t < 32 * kTileWarps; ++t) tiles.emplace_back(*m, t);
    for (const auto& t : tiles) {
      if (t.has(0)) t.publish(*m);
    }
    for (unsigned panel = 0; panel < kDim / kPanel; ++panel) {
      for (const auto& row : rows) row.publish(*m, panel);
      for (auto& row : rows) row.eliminate(*m, panel, inverse);
      if (panel + 1 == kDim / kPanel) break;
      for (auto& t : tiles) {
        if (t.has(panel + 1)) t.update_next(*m, panel, Products{});
      }
      for (auto& t : tiles) t.update_rest(*m, panel, Products{});
    }
    return substitute();
  }

  // The same by the kernel's threads, each a thread of its own.
  std::vector<double> solve_by_threads(float limit) {
    prepare(limit);
    Barriers<kDim> barriers;
    std::vector<std::thread> threads;
    for (int t = 0; t < kSolveThreads; ++t) {
      threads.emplace_back([this, &barriers, t] { Elimination<kDim>::run(*m, t, barriers, inverse, Products{}); });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_FALSE(barriers.overtaken);
    return substitute();
  }

  static float inverse(float x) { return 1 / x; }

  std::vector<double> substitute() const {
    std::vector<double> x(kDim);
    for (int i = kDim - 1; i >= 0; --i) {
      x[i] = m->rhs[i];
      for (int j = i + 1; j < kDim; ++j) x[i] -= m->at(j, i) * x[j];
    }
    return x;
  }
};

template <class T>
class DecodeEliminate : public testing::Test {};
using Dims = testing::Types<std::integral_constant<int, 64>, std::integral_constant<int, 128>>;
TYPED_TEST_SUITE(DecodeEliminate, Dims);

TYPED_TEST(DecodeEliminate, SolvesWhatItIsGiven) {
  constexpr int kDim = TypeParam::value;
  for (const double ridge : {1.0, 0.01, 1e-4}) {
    for (const int count : {kDim / 4, 4 * kDim}) {
      Eliminated<kDim> s(count, ridge, 3);
      EXPECT_LE(s.backward_error(s.solve(0x1p-20f)), 0x1p-22) << ridge << ", " << count << " keys";
      for (const float pivot : s.m->pivot) EXPECT_GT(pivot, 0);
    }
  }
}

// By the kernel's threads in whatever order they run, with nothing between them but its two barriers.
TYPED_TEST(DecodeEliminate, ThreadsNeedTheTwoBarriersOnly) {
  constexpr int kDim = TypeParam::value;
  Eliminated<kDim> s(4 * kDim, 0.1, 5);
  const std::vector<double> x = s.solve(0x1p-20f);
  for (int turn = 0; turn < 3; ++turn) EXPECT_EQ(s.solve_by_threads(0x1p-20f), x);
}

// Fewer keys than dimensions and no ridge: what rounding has left of a pivot is small against what came before it, most
// of it is dropped, and x is finite and solves the rest.
TYPED_TEST(DecodeEliminate, DropsPivotsThatAreRounding) {
  constexpr int kDim = TypeParam::value, kRank = kDim / 4;
  for (unsigned seed = 1; seed <= 12; ++seed) {
    Eliminated<kDim> s(kRank, 0, seed);
    std::vector<double> keys_only(kDim);
    for (int i = 0; i < kDim; ++i) {  // a right-hand side within the range
      for (int j = 0; j < kDim; ++j) keys_only[i] += s.a[i * kDim + j] * s.b[j];
    }
    s.b = keys_only;
    EXPECT_LE(s.backward_error(s.solve(0x1p-16f)), 0x1p-18) << seed;
    const auto share = [&](int i) { return s.m->pivot[i] / s.m->start[i]; };
    float smallest = 1;
    for (int i = 0; i < kRank; ++i) smallest = std::min(smallest, share(i));
    int dropped = 0;
    for (int i = kRank; i < kDim; ++i) {
      EXPECT_LE(std::abs(share(i)) * smallest, 0x1p-20f) << seed << ", pivot " << i;
      dropped += s.m->pivot[i] <= s.m->limit[i];
    }
    EXPECT_GE(dropped, kDim - kRank - 3) << seed;
  }
}

}  // namespace
}  // namespace lla::cuda::sm90::decode
