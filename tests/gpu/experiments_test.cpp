// The experiments' own code on a GPU: errors summed there equal the host's, the naive form is the same estimator, and a
// run on the GPU gives the CPU's numbers, interrupted or not.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "gpu/gpu_test.hpp"
#include "memory/device_call.hpp"
#include "regression/run.hpp"
#include "reproduce/scratch.hpp"

namespace lla::test {
namespace {

namespace ex = experiments;

class GpuExperiments : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu().present) GTEST_SKIP() << "no CUDA device: " << gpu().absent_reason;
  }
};

ex::Json regression(ex::Device device, const std::vector<ex::RegressionSetting>& settings, bool stop_often = false) {
  const ex::Scratch scratch;
  ex::RegressionRun request;
  request.settings = settings;
  request.out = scratch.path;
  request.device = device;
  ex::Progress progress;
  if (stop_often) progress.stop = [] { return true; };
  for (int runs = 0; !ex::run(request, progress).finished; ++runs) EXPECT_LT(runs, 50);
  return ex::read_results(scratch.path / ex::kResultsName)["records"];
}

// Every option of the data and both kernels; more sequences than two batches take.
std::vector<ex::RegressionSetting> settings() {
  ex::RegressionSetting plain{
      .length = 128, .d = 16, .segment = 32, .sequences = 1100, .ridges = {0.1, 1}, .scale = 0.25};
  ex::RegressionSetting rbf = plain, noisy = plain, normal = plain;
  rbf.kernel = ex::Kernel::rbf;
  noisy.query_noise = 0.3;
  normal.qk_norm = true;
  return {plain, rbf, noisy, normal};
}

TEST_F(GpuExperiments, RegressionGivesTheCpusNumbers) {
  const ex::Json cpu = regression(ex::Device::cpu, settings()), cuda = regression(ex::Device::cuda, settings());
  ASSERT_EQ(cpu.size(), cuda.size());
  for (size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_EQ(cpu[i]["model"], cuda[i]["model"]);
    const double want = cpu[i]["mse_mean"], got = cuda[i]["mse_mean"];
    EXPECT_NEAR(got, want, 2e-4 * want) << cpu[i]["model"] << " " << i;
  }
}

TEST_F(GpuExperiments, AnInterruptedRegressionGivesTheSameBits) {
  EXPECT_EQ(regression(ex::Device::cuda, {settings()[2]}), regression(ex::Device::cuda, {settings()[2]}, true));
}

TEST_F(GpuExperiments, TheNaiveFormIsTheSameEstimator) {
  const auto memory = ex::open_device(ex::Device::cuda);
  for (const int64_t d : {8, 40, 64, 128}) {
    for (const bool bf16 : {false, true}) {
      const auto measure = [&](const char* method) {
        return ex::measure_on_device(*memory, {method, bf16, 2, 200, d, 1.0, 5}, true);
      };
      const ex::DeviceCost naive = measure("naive"), blockwise = measure("blockwise");
      ASSERT_TRUE(naive.ran && blockwise.ran);
      double difference = 0, norm = 0;
      for (size_t i = 0; i < naive.head.size(); ++i) {
        difference += std::pow(double(naive.head[i]) - blockwise.head[i], 2);
        norm += std::pow(double(blockwise.head[i]), 2);
      }
      // Weights and differences in bf16 cost the z-form its digits; f32 must agree to the solver's tolerance.
      EXPECT_LT(std::sqrt(difference / norm), bf16 ? 2e-1 : 3e-3) << d;
      EXPECT_GT(naive.peak_bytes, 2.0 * 200 * 200 * d * (bf16 ? 2 : 4));
    }
  }
}

TEST_F(GpuExperiments, WhatDoesNotFitIsSaidAndLeavesTheDeviceUsable) {
  const auto memory = ex::open_device(ex::Device::cuda);
  const ex::DeviceCost cost = ex::measure_on_device(*memory, {"naive", false, 16, 1 << 17, 128, 1.0, 5}, true);
  EXPECT_FALSE(cost.fits);
  EXPECT_FALSE(cost.ran);
  EXPECT_TRUE(ex::measure_on_device(*memory, {"naive", false, 1, 64, 64, 1.0, 5}, true).ran);
}

}  // namespace
}  // namespace lla::test
