// The conjugate gradients of the Hopper decode's solve on the CPU, every thread of a block a thread of its own, against
// fp64; what nobody has written is NaN.
#include "cuda/sm90/decode/conjugate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "decode_system.hpp"

namespace lla::cuda::sm90::decode {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// What a block's shuffles and barriers do, by memory that all see. Places take turns: nobody writes what another may
// still read.
template <int kDim>
struct Block {
  using Part = MatrixPart<kDim>;
  struct All {
    std::barrier<> barrier{kSolveThreads};
    std::array<float, kDim> u;
    std::array<Two, kSolveThreads> products, rows;
  };
  All& all;

  const float* publish(float u, unsigned thread) const {
    if (Part::speaks(thread)) all.u[Part::own_row(thread)] = u;
    all.barrier.arrive_and_wait();
    return all.u.data();
  }
  float own(const Two& products, unsigned thread) const {
    all.products[thread] = products;
    all.barrier.arrive_and_wait();
    float sum = 0;
    for (unsigned i = 0; i < Part::kLanes; ++i)
      sum += all.products[thread / Part::kLanes * Part::kLanes + i].at[thread % 2];
    return sum;
  }
  Two sum(Two of_row, unsigned thread) const {
    all.rows[thread] = of_row;
    all.barrier.arrive_and_wait();
    Two total{};
    for (unsigned t = 0; t < kSolveThreads; ++t) {
      if (!Part::speaks(t)) continue;
      total.at[0] += all.rows[t].at[0], total.at[1] += all.rows[t].at[1];
    }
    all.barrier.arrive_and_wait();
    return total;
  }
};

struct Solved {
  bool found;
  std::vector<double> x;
};

template <int kDim>
Solved solve(const System<kDim>& s) {
  using Part = MatrixPart<kDim>;
  const auto square = std::make_unique<Square<kDim>>();
  std::fill_n(square->rows, std::size(square->rows), kNan);
  for (unsigned i = 0; i < kDim; ++i) {
    for (unsigned j = 0; j < kDim; ++j) square->at(i, j) = static_cast<float>(s.a[i * kDim + j]);
  }
  const auto all = std::make_unique<typename Block<kDim>::All>();
  all->u.fill(kNan), all->products.fill({kNan, kNan}), all->rows.fill({kNan, kNan});
  std::vector<float> x(kSolveThreads, kNan);
  std::array<bool, kSolveThreads> found{};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kSolveThreads; ++t) {
    threads.emplace_back([&, t] {
      const unsigned row = Part::own_row(t);
      const Block<kDim> block{*all};
      const auto inverse = [](float value) { return 1 / value; };
      found[t] = conjugate_gradients(Part(*square, t), static_cast<float>(s.b[row]), square->at(row, row), t, block,
                                     inverse, x[t]);
    });
  }
  for (auto& thread : threads) thread.join();
  Solved out{found[0], std::vector<double>(kDim)};
  for (unsigned t = 0; t < kSolveThreads; ++t) {
    EXPECT_EQ(found[t], found[0]) << "thread " << t;
    if (Part::speaks(t)) out.x[Part::own_row(t)] = x[t];
  }
  return out;
}

// What is left of the right-hand side, as the steps measure it.
template <int kDim>
double left(const System<kDim>& s, const std::vector<double>& x) {
  const std::vector<double> rest = s.residual(x);
  double of_rest = 0, of_all = 0;
  for (int i = 0; i < kDim; ++i) {
    of_rest += rest[i] * rest[i] / s.a[i * kDim + i], of_all += s.b[i] * s.b[i] / s.a[i * kDim + i];
  }
  return std::sqrt(of_rest / of_all);
}

template <class T>
class DecodeConjugate : public testing::Test {};
using Dims = testing::Types<std::integral_constant<int, 64>, std::integral_constant<int, 128>>;
TYPED_TEST_SUITE(DecodeConjugate, Dims);

TYPED_TEST(DecodeConjugate, SolvesWhatHasAModestCondition) {
  constexpr int kDim = TypeParam::value;
  for (const double ridge : {1.0, 0.1, 1e-3}) {
    const System<kDim> s(16 * kDim, ridge, 3);
    const Solved solved = solve(s);
    ASSERT_TRUE(solved.found) << ridge;
    EXPECT_LE(left(s, solved.x), 1.1 * kStepsGoal) << ridge;
  }
}

// Coordinates of very different sizes cost no more steps: the diagonal is divided by.
TYPED_TEST(DecodeConjugate, MindsNoScales) {
  constexpr int kDim = TypeParam::value;
  const System<kDim> s(16 * kDim, 0, 4, 1000);
  const Solved solved = solve(s);
  ASSERT_TRUE(solved.found);
  EXPECT_LE(left(s, solved.x), 1.1 * kStepsGoal);
}

// Easy or not: who says that x was found has found it, and a matrix that is nearly singular is left to the elimination.
TYPED_TEST(DecodeConjugate, SaysWhetherItHasSolved) {
  constexpr int kDim = TypeParam::value;
  int given_up = 0;
  for (const double ridge : {1e-1, 1e-3, 1e-5}) {
    for (const int count : {kDim / 4, kDim, 2 * kDim}) {
      const System<kDim> s(count, ridge, 5);
      const Solved solved = solve(s);
      if (solved.found) {
        EXPECT_LE(left(s, solved.x), 2 * kStepsGoal) << ridge << ", " << count << " vectors";
      }
      given_up += !solved.found;
    }
  }
  EXPECT_GE(given_up, 3);
}

TYPED_TEST(DecodeConjugate, KnowsNothingAndWhatIsNotFinite) {
  constexpr int kDim = TypeParam::value;
  System<kDim> s(4 * kDim, 0.1, 6);
  const std::vector<double> right = s.b;
  std::fill(s.b.begin(), s.b.end(), 0);
  const Solved nothing = solve(s);
  EXPECT_TRUE(nothing.found);
  EXPECT_EQ(nothing.x, std::vector<double>(kDim));
  s.b = right;
  for (const double wrong : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    System<kDim> broken = s;
    broken.a[5 * kDim + 7] = broken.a[7 * kDim + 5] = wrong;
    EXPECT_FALSE(solve(broken).found) << wrong;
    broken = s;
    broken.b[9] = wrong;
    EXPECT_FALSE(solve(broken).found) << wrong;
  }
}

}  // namespace
}  // namespace lla::cuda::sm90::decode
