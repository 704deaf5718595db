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
  std::vector<float> q(n * d), k(n * d), v(n * d), o(n * d, NAN);
  Stream(1, 0, 0).normal(q.data(), q.size());
  Stream(1, 0, 1).normal(k.data(), k.size());
  Stream(1, 0, 2).normal(v.data(), v.size());
  naive_lla(n, d, 0.4, 0.1, q.data(), k.data(), v.data(), o.data(), 2);
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
}

}  // namespace
}  // namespace lla::experiments
