// LLA and softmax attention of a batch, both forms, against a plain fp64 loop.
#include "regression/attention.hpp"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "regression/data.hpp"

namespace lla::experiments {
namespace {

// One position: keys [0, visible), query i.
struct Row {
  std::vector<double> lla, softmax;
};

// With weights exp(scale q.k), or exp(-scale |q - k|^2 / 2).
Row plain(const Sequence& s, const RegressionSetting& setting, int i, int visible, double ridge) {
  const int d = setting.d;
  Row row{std::vector<double>(d, 0), std::vector<double>(d, 0)};
  if (visible == 0) return row;
  const float* q = s.q + i * d;
  std::vector<double> weight(visible);
  double total = 0, top = -INFINITY;
  for (int j = 0; j < visible; ++j) {
    double dot = 0, distance = 0;
    for (int c = 0; c < d; ++c) {
      dot += double(q[c]) * s.k[j * d + c];
      distance += std::pow(double(q[c]) - s.k[j * d + c], 2);
    }
    weight[j] = setting.scale * (setting.kernel == Kernel::rbf ? -distance / 2 : dot);
    top = std::max(top, weight[j]);
  }
  for (double& w : weight) total += w = std::exp(w - top);
  // The weighted fit with an intercept, by its normal equations about the mean key.
  std::vector<double> mean(d, 0);
  for (int j = 0; j < visible; ++j) {
    weight[j] /= total;
    for (int c = 0; c < d; ++c) {
      mean[c] += weight[j] * s.k[j * d + c];
      row.softmax[c] += weight[j] * s.v[j * d + c];
    }
  }
  std::vector<double> a(d * d, 0), x(d);
  for (int j = 0; j < visible; ++j) {
    for (int c = 0; c < d; ++c) {
      for (int e = 0; e < d; ++e) a[c * d + e] += weight[j] * (s.k[j * d + c] - mean[c]) * (s.k[j * d + e] - mean[e]);
    }
  }
  for (int c = 0; c < d; ++c) a[c * d + c] += ridge, x[c] = q[c] - mean[c];
  for (int c = 0; c < d; ++c) {  // positive definite: elimination without pivoting
    for (int r = c + 1; r < d; ++r) {
      const double f = a[r * d + c] / a[c * d + c];
      for (int t = c; t < d; ++t) a[r * d + t] -= f * a[c * d + t];
      x[r] -= f * x[c];
    }
  }
  for (int r = d - 1; r >= 0; --r) {
    for (int t = r + 1; t < d; ++t) x[r] -= a[r * d + t] * x[t];
    x[r] /= a[r * d + r];
  }
  for (int j = 0; j < visible; ++j) {
    double e = 1;
    for (int c = 0; c < d; ++c) e += (s.k[j * d + c] - mean[c]) * x[c];
    for (int c = 0; c < d; ++c) row.lla[c] += weight[j] * e * s.v[j * d + c];
  }
  return row;
}

// Both kernels, queries that are the keys and queries of their own, with and without normalised keys.
TEST(Attention, OutputsAndErrorsAgainstPlainLoop) {
  for (const int d : {4, 16, 40}) {
    for (const int variant : {0, 1, 2, 3}) {
      RegressionSetting s{.length = 128, .d = d, .segment = 32, .sequences = 3, .scale = 1 / std::sqrt(double(d))};
      if (variant % 2 == 1) s.kernel = Kernel::rbf;
      if (variant == 2) s.qk_norm = true;
      if (variant >= 2) s.query_noise = 0.4;
      const int64_t stride = int64_t{s.length} * d;
      std::vector<float> k(3 * stride), v(3 * stride), q(3 * stride), target(3 * stride);
      const auto at = [&](int64_t b) {
        const int64_t o = b * stride;
        return s.query_noise ? Sequence{k.data() + o, v.data() + o, q.data() + o, target.data() + o}
                             : Sequence{k.data() + o, v.data() + o, k.data() + o, v.data() + o};
      };
      for (int b = 0; b < 3; ++b) PiecewiseLinear(s).generate(b, at(b));
      const auto memory = open_device(Device::cpu);
      Attention attention(*memory, s);
      const Attention::Batch batch{3, at(0).k, at(0).v, at(0).q, at(0).target};
      for (const bool strict : {false, true}) {
        for (const double ridge : {0.1, 1.0}) {
          std::vector<float> lla(3 * stride, NAN), softmax(3 * stride, NAN);
          attention.outputs(batch, ridge, strict, lla.data(), softmax.data());
          Attention whole(*memory, s);
          whole.start(batch, {1.0, 0.1}, 2);
          whole.finish();
          for (int b = 0; b < 3; ++b) {
            double difference = 0, norm = 0, softmax_difference = 0;
            for (int i = 0; i < s.length; ++i) {
              const Row row = plain(at(b), s, i, strict ? i : i + 1, ridge);
              double error = 0, softmax_error = 0;
              for (int c = 0; c < d; ++c) {
                const int64_t element = b * stride + i * d + c;
                difference += std::pow(lla[element] - row.lla[c], 2);
                softmax_difference += std::pow(softmax[element] - row.softmax[c], 2);
                norm += std::pow(row.lla[c], 2);
                error += std::pow(double(lla[element]) - at(b).target[i * d + c], 2);
                softmax_error += std::pow(double(softmax[element]) - at(b).target[i * d + c], 2);
              }
              EXPECT_NEAR(whole.errors(strict, ridge == 1.0 ? 0 : 1, b)[i], error, 1e-12 * error);
              EXPECT_NEAR(whole.errors(strict, 2, b)[i], softmax_error, 1e-12 * softmax_error);
            }
            EXPECT_LT(std::sqrt(difference / norm), 2e-4) << "d " << d << " strict " << strict << " " << variant;
            EXPECT_LT(std::sqrt(softmax_difference / norm), 1e-5) << "d " << d << " strict " << strict;
          }
        }
      }
    }
  }
}

// For keys of one length the two kernels are the same: the paper's remark on QK normalisation.
TEST(Attention, KernelsAgreeForNormalisedKeys) {
  RegressionSetting s{.length = 128, .d = 16, .segment = 64, .sequences = 1, .scale = 0.25, .qk_norm = true};
  std::vector<float> k(128 * 16), v(k.size());
  PiecewiseLinear(s).generate(0, {k.data(), v.data(), k.data(), v.data()});
  const auto memory = open_device(Device::cpu);
  std::vector<float> lla[2], softmax[2];
  for (const Kernel kernel : {Kernel::dot, Kernel::rbf}) {
    s.kernel = kernel;
    lla[int(kernel)].resize(k.size()), softmax[int(kernel)].resize(k.size());
    Attention(*memory, s)
        .outputs({1, k.data(), v.data(), k.data(), v.data()}, 0.1, false, lla[int(kernel)].data(),
                 softmax[int(kernel)].data());
  }
  for (size_t i = 0; i < k.size(); ++i) {
    EXPECT_NEAR(lla[0][i], lla[1][i], 1e-3);
    EXPECT_NEAR(softmax[0][i], softmax[1][i], 1e-4);
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
