// LLA and softmax attention of a batch, both forms, against a plain fp64 loop.
#include "regression/attention.hpp"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "reference/reference.hpp"
#include "regression/data.hpp"

namespace lla::experiments {
namespace {

// One position: keys [0, visible), query i.
struct Row {
  std::vector<double> lla, softmax;
};

Row plain(const float* k, const float* v, int d, int i, int visible, double scale, double ridge) {
  Row row{std::vector<double>(d, 0), std::vector<double>(d, 0)};
  if (visible == 0) return row;
  reference::Head head;
  head.length_q = 1, head.length_k = visible;
  head.dim = head.value_dim = d;
  head.q.assign(k + i * d, k + (i + 1) * d);
  head.k.assign(k, k + visible * d);
  head.v.assign(v, v + visible * d);
  head.ridge.assign(d, ridge);
  head.scale = scale;
  row.lla = reference::forward(head, {}).o;
  double total = 0;
  std::vector<double> weight(visible);
  for (int j = 0; j < visible; ++j) {
    double dot = 0;
    for (int c = 0; c < d; ++c) dot += double(k[i * d + c]) * k[j * d + c];
    total += weight[j] = std::exp(scale * (dot - 0.5 * d));  // any common factor
  }
  for (int j = 0; j < visible; ++j) {
    for (int c = 0; c < d; ++c) row.softmax[c] += weight[j] / total * v[j * d + c];
  }
  return row;
}

TEST(Attention, BothFormsAgainstPlainLoop) {
  for (const int d : {4, 16, 40}) {
    const RegressionSetting s{
        .length = 128, .d = d, .segment = 32, .sequences = 3, .ridge = 0.1, .scale = 1 / std::sqrt(double(d))};
    const size_t stride = size_t(s.length) * d;
    std::vector<float> k(3 * stride), v(3 * stride);
    for (int b = 0; b < 3; ++b) PiecewiseLinear(s).generate(b, k.data() + b * stride, v.data() + b * stride);
    const auto memory = open_device(Device::cpu);
    Attention attention(*memory, s);
    for (const bool strict : {false, true}) {
      std::vector<float> lla(3 * stride, NAN), softmax(3 * stride, NAN);
      attention.run(3, k.data(), v.data(), strict, lla.data(), softmax.data());
      for (int b = 0; b < 3; ++b) {
        double difference = 0, norm = 0, softmax_difference = 0;
        for (int i = 0; i < s.length; ++i) {
          const Row row =
              plain(k.data() + b * stride, v.data() + b * stride, d, i, strict ? i : i + 1, s.scale, s.ridge);
          for (int c = 0; c < d; ++c) {
            difference += std::pow(lla[b * stride + i * d + c] - row.lla[c], 2);
            softmax_difference += std::pow(softmax[b * stride + i * d + c] - row.softmax[c], 2);
            norm += std::pow(row.lla[c], 2);
          }
        }
        EXPECT_LT(std::sqrt(difference / norm), 2e-4) << "d " << d << " strict " << strict;
        EXPECT_LT(std::sqrt(softmax_difference / norm), 1e-5) << "d " << d << " strict " << strict;
        if (strict) {
          for (int c = 0; c < d; ++c) {
            EXPECT_EQ(lla[b * stride + c], 0.0f);
            EXPECT_EQ(softmax[b * stride + c], 0.0f);
          }
        }
      }
    }
  }
}

TEST(Attention, CudaIsRefusedWithAReasonWhereThereIsNone) {
  try {
    open_device(Device::cuda);
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("--device cuda cannot be used: "), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lla::experiments
