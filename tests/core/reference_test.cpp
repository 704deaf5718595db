// The reference itself: gradients against finite differences, the two solvers against each other and against hand-made
// systems.
#include "reference/reference.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "data/data.hpp"

namespace lla::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Vector normals(size_t count, uint64_t stream) {
  Vector v(count);
  for (size_t i = 0; i < count; ++i) v[i] = data::normal(5, stream, i);
  return v;
}

struct Case {
  const char* name;
  int64_t length_q, length_k, dim, value_dim;
  core::Mask mask;
  bool given_x;
};

Head make_head(const Case& c) {
  Head head;
  head.length_q = c.length_q;
  head.length_k = c.length_k;
  head.dim = c.dim;
  head.value_dim = c.value_dim;
  head.mask = c.mask;
  head.scale = 0.7 / std::sqrt(static_cast<double>(c.dim));
  const auto rows = static_cast<size_t>(c.length_q * c.dim);
  head.q = normals(rows, 1);
  head.k = normals(static_cast<size_t>(c.length_k * c.dim), 2);
  head.v = normals(static_cast<size_t>(c.length_k * c.value_dim), 3);
  if (c.given_x) {
    head.x = normals(rows, 4);
  } else {
    head.ridge.resize(rows);
    for (size_t i = 0; i < rows; ++i) head.ridge[i] = 0.05 + data::uniform(5, 5, i);
  }
  return head;
}

double loss(const Head& head, const Vector& g) {
  const Vector o = forward(head, {}).o;
  double sum = 0;
  for (size_t i = 0; i < o.size(); ++i) sum += o[i] * g[i];
  return sum;
}

// Fourth-order central differences of the loss in each element of `input`.
Vector differences(Head head, Vector Head::*input, const Vector& g) {
  constexpr double h = 1e-3;
  Vector result;
  for (size_t i = 0; i < (head.*input).size(); ++i) {
    const double at = (head.*input)[i];
    const auto moved = [&](double step) {
      (head.*input)[i] = at + step;
      const double value = loss(head, g);
      (head.*input)[i] = at;
      return value;
    };
    result.push_back((8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h));
  }
  return result;
}

double relative(const Vector& got, const Vector& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

class ReferenceGradient : public testing::TestWithParam<Case> {};

TEST_P(ReferenceGradient, MatchesFiniteDifferences) {
  const Head head = make_head(GetParam());
  const Vector g = normals(static_cast<size_t>(head.length_q * head.value_dim), 9);
  const BackwardResult got = backward(head, g, {});
  EXPECT_LE(relative(got.dq, differences(head, &Head::q, g)), 1e-7);
  EXPECT_LE(relative(got.dk, differences(head, &Head::k, g)), 1e-7);
  EXPECT_LE(relative(got.dv, differences(head, &Head::v, g)), 1e-7);
  EXPECT_LE(relative(got.dridge, differences(head, &Head::ridge, g)), 1e-7);
  EXPECT_LE(relative(got.dx, differences(head, &Head::x, g)), 1e-7);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ReferenceGradient,
    testing::Values(Case{"causal", 12, 12, 4, 3, {-1, 0}, false}, Case{"full", 5, 9, 3, 4, {-1, -1}, false},
                    Case{"short_queries", 4, 11, 5, 2, {-1, 0}, false},
                    Case{"more_queries", 9, 5, 3, 3, {-1, 0}, false}, Case{"window", 14, 14, 3, 3, {3, 1}, false},
                    Case{"one_dimension", 8, 8, 1, 1, {-1, 0}, false}, Case{"given_x", 9, 9, 4, 3, {-1, 0}, true},
                    Case{"given_x_window", 9, 12, 4, 3, {2, 2}, true}),
    [](const auto& info) { return info.param.name; });

TEST(ReferenceGradient, InfiniteRidgeIsThatDimensionLeftOut) {
  Head head = make_head({"", 10, 10, 4, 3, {-1, 0}, false});
  for (size_t i = 0; i < head.ridge.size(); i += 4) head.ridge[i] = kInf;
  const Vector g = normals(static_cast<size_t>(head.length_q * head.value_dim), 9);
  const BackwardResult got = backward(head, g, {});
  EXPECT_LE(relative(got.dq, differences(head, &Head::q, g)), 1e-7);
  EXPECT_LE(relative(got.dk, differences(head, &Head::k, g)), 1e-7);
  for (size_t i = 0; i < head.ridge.size(); i += 4) EXPECT_EQ(got.dridge[i], 0);
  const Vector x = forward(head, {}).x;
  for (size_t i = 0; i < x.size(); i += 4) EXPECT_EQ(x[i], 0);
}

TEST(ReferenceGradient, GivenTheSolvedXTheOutputIsTheSame) {
  const Head solved = make_head({"", 10, 10, 4, 3, {-1, 0}, false});
  Head given = solved;
  const ForwardResult want = forward(solved, {});
  given.ridge.clear();
  given.x = want.x;
  EXPECT_LE(relative(forward(given, {}).o, want.o), 1e-15);
}

// ---- solvers -------------------------------------------------------------------------------------------------------

struct System {
  Vector covariance, ridge, b;
};

System random_system(size_t n, double ridge) {
  const Vector keys = normals(3 * n * n, 11);
  Vector mean(n, 0.0);
  const Vector p(3 * n, 1.0 / static_cast<double>(3 * n));
  for (size_t j = 0; j < 3 * n; ++j) {
    for (size_t d = 0; d < n; ++d) mean[d] += p[j] * keys[j * n + d];
  }
  return {covariance(p, keys, mean), Vector(n, ridge), normals(n, 12)};
}

double true_residual(const System& s, const Vector& x) {
  const size_t n = s.b.size();
  double residual = 0, norm = 0;
  for (size_t i = 0; i < n; ++i) {
    double r = s.b[i] - s.ridge[i] * x[i];
    for (size_t j = 0; j < n; ++j) r -= s.covariance[i * n + j] * x[j];
    residual += r * r;
    norm += s.b[i] * s.b[i];
  }
  return std::sqrt(residual / norm);
}

TEST(ReferenceSolvers, DirectSolvesToRounding) {
  for (size_t n : {1, 2, 7, 64}) {
    const System s = random_system(n, 0.01);
    const Solution solution = solve_direct(s.covariance, s.ridge, s.b);
    EXPECT_EQ(solution.status, LLA_ROW_OK);
    EXPECT_EQ(solution.iterations, -1);
    EXPECT_EQ(solution.residual, -1);
    EXPECT_LE(true_residual(s, solution.x), 1e-12) << n;
  }
}

TEST(ReferenceSolvers, CgTracesItsResidualDownToTheTolerance) {
  const System s = random_system(32, 0.1);
  const Solution solution = solve_cg(s.covariance, s.ridge, s.b, 1e-8, 100);
  EXPECT_EQ(solution.status, LLA_ROW_OK);
  ASSERT_EQ(solution.trace.size(), static_cast<size_t>(solution.iterations) + 1);
  EXPECT_EQ(solution.trace.front(), 1);
  EXPECT_EQ(solution.trace.back(), solution.residual);
  EXPECT_LE(solution.residual, 1e-8);
  EXPECT_GT(solution.trace[solution.trace.size() - 2], 1e-8);  // and not an iteration too many
  EXPECT_NEAR(true_residual(s, solution.x), solution.residual, 1e-12);
  EXPECT_LE(relative(solution.x, solve_direct(s.covariance, s.ridge, s.b).x), 1e-6);
}

TEST(ReferenceSolvers, CgNeedsAsManyIterationsAsThereAreEigenvalues) {
  const size_t n = 12;
  Vector diagonal(n * n, 0.0);
  for (size_t i = 0; i < n; ++i) diagonal[i * n + i] = 1.0 + static_cast<double>(i % 3);  // three of them
  EXPECT_EQ(solve_cg(diagonal, Vector(n, 0.0), normals(n, 3), 1e-12, 100).iterations, 3);
}

TEST(ReferenceSolvers, CgReportsWhenItRunsOut) {
  const System s = random_system(32, 0.001);
  const Solution solution = solve_cg(s.covariance, s.ridge, s.b, 1e-10, 4);
  EXPECT_EQ(solution.status, LLA_ROW_MAX_ITERATIONS);
  EXPECT_EQ(solution.iterations, 4);
  EXPECT_GT(solution.residual, 1e-10);
}

TEST(ReferenceSolvers, ZeroRightHandSideNeedsNothing) {
  const System s = random_system(8, 0.1);
  const Solution solution = solve_cg(s.covariance, s.ridge, Vector(8, 0.0), 1e-3, 100);
  EXPECT_EQ(solution.iterations, 0);
  EXPECT_EQ(solution.residual, 0);
  EXPECT_EQ(solution.x, Vector(8, 0.0));
}

TEST(ReferenceSolvers, SingularSystemsStayFiniteAndAreReported) {
  const size_t n = 6;
  Vector rank_one(n * n);
  const Vector u = normals(n, 21);
  for (size_t i = 0; i < n * n; ++i) rank_one[i] = u[i / n] * u[i % n];
  for (const Vector& matrix : {rank_one, Vector(n * n, 0.0)}) {
    for (const double ridge : {0.0, 1e-300}) {
      const Solution direct = solve_direct(matrix, Vector(n, ridge), normals(n, 22));
      const Solution cg = solve_cg(matrix, Vector(n, ridge), normals(n, 22), 1e-3, 64);
      if (ridge == 0 || matrix[0] != 0) {
        EXPECT_EQ(direct.status, LLA_ROW_BREAKDOWN);
        EXPECT_NE(cg.status, LLA_ROW_OK);
      }
      for (double x : direct.x) EXPECT_TRUE(std::isfinite(x));
      for (double x : cg.x) EXPECT_TRUE(std::isfinite(x));
    }
  }
}

TEST(ReferenceSolvers, InfiniteRidgeRemovesADimension) {
  System s = random_system(5, 0.2);
  s.ridge[2] = kInf;
  System without{{}, {}, {}};
  for (size_t i = 0; i < 5; ++i) {
    if (i == 2) continue;
    without.b.push_back(s.b[i]);
    without.ridge.push_back(s.ridge[i]);
    for (size_t j = 0; j < 5; ++j) {
      if (j != 2) without.covariance.push_back(s.covariance[i * 5 + j]);
    }
  }
  Vector want = solve_direct(without.covariance, without.ridge, without.b).x;
  want.insert(want.begin() + 2, 0.0);
  EXPECT_LE(relative(solve_direct(s.covariance, s.ridge, s.b).x, want), 1e-14);
  EXPECT_LE(relative(solve_cg(s.covariance, s.ridge, s.b, 1e-13, 50).x, want), 1e-11);
}

}  // namespace
}  // namespace lla::reference
