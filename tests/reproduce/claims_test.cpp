// What the page says, held to small runs: the paper's orderings, the theoretical rates, the memory that is measured.
#include <array>
#include <map>
#include <numeric>

#include <gtest/gtest.h>

#include "memory/peak.hpp"
#include "memory/run.hpp"
#include "rates/lemmas.hpp"
#include "rates/run.hpp"
#include "regression/run.hpp"
#include "scratch.hpp"

namespace lla::experiments {
namespace {

// Mean error of each model over positions [first, last).
std::map<std::string, double> means(const Json& file, bool strict, int first, int last) {
  std::map<std::string, double> out;
  for (const Json& r : file["records"]) {
    if (r["strict"] != strict) continue;
    const std::vector<double> mse = r["mse"];
    out[r["model"]] = std::accumulate(mse.begin() + first, mse.begin() + last, 0.0) / (last - first);
  }
  return out;
}

Json regression(int segment) {
  const Scratch scratch;
  RegressionRun request;
  request.settings = {{.d = 64, .segment = segment, .sequences = 16, .scale = 0.125}};
  request.out = scratch.path;
  EXPECT_TRUE(run(request, {}).finished);
  return read_results(scratch.path / kResultsName);
}

// The paper's Figure "regression fit": after the first shift LLA is below softmax, softmax below MesaNet.
TEST(Claims, OrderAfterTheFirstShiftInThePapersForm) {
  auto m = means(regression(256), false, 256, 1024);
  EXPECT_LT(m["lla"], 0.1 * m["softmax"]);
  EXPECT_LT(m["softmax"], 0.5 * m["mesanet"]);
  EXPECT_LT(m["mesanet"], m["random"]);
}

// Predicting before seeing: within one segment the global linear model is right, and MesaNet is it.
TEST(Claims, MesaNetIsLowestStrictlyWithinOneSegment) {
  auto m = means(regression(1024), true, 0, 1024);
  EXPECT_LT(m["mesanet"], 0.8 * m["lla"]);
  EXPECT_LT(m["lla"], m["softmax"]);
  EXPECT_LT(m["softmax"], m["random"]);
}

// Propositions 1 and 2: the theoretical exponents lie in the fitted intervals.
TEST(Claims, RatesLieInTheirIntervals) {
  const Scratch scratch;
  RatesRun request;
  request.dims = {1, 2, 3, 4};
  request.sizes = rate_sizes(2);
  request.repetitions = 24;
  request.out = scratch.path;
  ASSERT_TRUE(run(request, {}));
  const Json file = read_results(scratch.path / kResultsName);
  for (const Json& s : file["summary"]["slopes"]) {
    if (s["estimator"] == "global_linear") {
      EXPECT_NEAR(s["slope"].get<double>(), 0, 0.01) << s;
      continue;
    }
    EXPECT_LE(s["low"].get<double>(), s["theory"].get<double>()) << s;
    EXPECT_GE(s["high"].get<double>(), s["theory"].get<double>()) << s;
    // An interval that holds everything would say nothing; the plain line is near the theory as well.
    EXPECT_LT(s["high"].get<double>() - s["low"].get<double>(), 0.8) << s;
    EXPECT_NEAR(s["plain_slope"].get<double>(), s["theory"].get<double>(), 0.08) << s;
  }
}

// In one dimension, where the scatter is small: the exponents of the lemmas, plainly fitted.
TEST(Claims, LemmasHoldInOneDimension) {
  const Scratch scratch;
  LemmasRun request;
  request.dims = {1};
  request.sizes = {5000, 20000};
  request.repetitions = 3;
  request.out = scratch.path;
  ASSERT_TRUE(run(request, {}));
  const Json file = read_results(scratch.path / kResultsName);
  ASSERT_EQ(file["summary"]["slopes"].size(), 6u);
  for (const Json& s : file["summary"]["slopes"]) {
    const double theory = s["theory"];
    EXPECT_NEAR(s["plain_slope"].get<double>(), theory, 0.08 * theory + 0.08) << s;
  }
}

TEST(MeasureCost, SeesWhatIsTouchedAndNotWhatWasThereBefore) {
  std::vector<char> before(64 << 20, 1);
  const Cost none = measure_cost([] {});
  const Cost some = measure_cost([] {
    std::vector<char> memory(96 << 20, 1);
    volatile char keep = memory[12345];
    (void)keep;
  });
  EXPECT_LT(none.peak_bytes, 4 << 20);
  EXPECT_NEAR(some.peak_bytes, 96 << 20, 8 << 20);
  EXPECT_EQ(before[99], 1);
}

TEST(Claims, NaiveMemoryIsQuadraticAndBlockwiseIsNot) {
  const Scratch scratch;
  MemoryRun request;
  request.dims = {32};
  request.lengths = {256, 512, 1024, 2048, 4096, 8192};
  request.limit_bytes = 300e6;  // n = 2048 would need 540 MB
  request.out = scratch.path;
  ASSERT_TRUE(run(request, {}));
  const Json file = read_results(scratch.path / kResultsName);
  for (const Json& e : file["summary"]["exponents"]) {
    if (e["method"] == "naive") {
      EXPECT_NEAR(e["memory"].get<double>(), 2, 0.15);
    } else if (e["method"] == "blockwise") {
      EXPECT_LT(e["memory"].get<double>(), 1.3);
    }
  }
  int too_large = 0;
  for (const Json& r : file["records"]) too_large += r["fits"] == false;
  EXPECT_EQ(too_large, 3);
}

TEST(Claims, AStepOfGenerationNeedsLittleBesideTheCache) {
  const Scratch scratch;
  MemoryRun request;
  request.decode = true;
  request.dims = {64};
  request.batches = {2};
  request.lengths = {8192, 32768, 131072};
  request.limit_bytes = 1e9;
  request.out = scratch.path;
  ASSERT_TRUE(run(request, {}));
  std::map<std::string, std::vector<double>> peaks;
  const Json file = read_results(scratch.path / kResultsName);
  for (const Json& r : file["records"]) {
    EXPECT_EQ(r["task"], "memory-decode");
    peaks[r["method"]].push_back(r["peak_bytes"]);
  }
  const double cache = 2.0 * 2 * 131072 * 64 * 4;
  EXPECT_NEAR(peaks["naive"][2] / (cache / 2), 1, 0.1);  // the differences, and little else
  EXPECT_LT(peaks["blockwise"][2], cache / 30);
  EXPECT_LT(peaks["blockwise"][2], 4 * peaks["blockwise"][1]);  // while n grows fourfold
  EXPECT_LT(peaks["softmax"][2], peaks["blockwise"][2]);
}

}  // namespace
}  // namespace lla::experiments
