#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "common/random.hpp"
#include "memory/naive.hpp"
#include "reference/reference.hpp"

namespace lla::experiments {
namespace {

TEST(NaiveLla, AgreesWithTheReference) {
  const int64_t n = 48, d = 8;
  std::vector<float> q(n * d), k(n * d), v(n * d), o(n * d, NAN), last(2 * d, NAN);
  Stream(1, 0, 0).normal(q.data(), q.size());
  Stream(1, 0, 1).normal(k.data(), k.size());
  Stream(1, 0, 2).normal(v.data(), v.size());
  naive_lla({1, n, n, d}, 0.4, 0.1, q.data(), k.data(), v.data(), o.data(), 2);
  reference::Head head;
  head.length_q = head.length_k = n;
  head.dim = head.value_dim = d;
  head.q.assign(q.begin(), q.end());
  head.k.assign(k.begin(), k.end());
  head.v.assign(v.begin(), v.end());
  head.ridge.assign(n * d, 0.1);
  head.scale = 0.4;
  head.mask.right = 0;
  const auto truth = reference::forward(head, {}).o;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < o.size(); ++i) difference += std::pow(o[i] - truth[i], 2), norm += truth[i] * truth[i];
  EXPECT_LT(std::sqrt(difference / norm), 1e-4);
  // One query over a cache is the last row; a batch of two is each alone.
  for (auto* x : {&k, &v}) x->insert(x->end(), x->begin(), x->begin() + n * d);
  const std::vector<float> queries(q.end() - d, q.end());
  q = queries;
  q.insert(q.end(), queries.begin(), queries.end());
  naive_lla({2, 1, n, d}, 0.4, 0.1, q.data(), k.data(), v.data(), last.data(), 2);
  for (int64_t c = 0; c < 2 * d; ++c) EXPECT_NEAR(last[c], o[(n - 1) * d + c % d], 1e-6) << c;
}

}  // namespace
}  // namespace lla::experiments
