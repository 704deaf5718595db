// The whole run: fixed-seed values, independence of threads and interruptions, sweeps.
#include "regression/run.hpp"

#include <gtest/gtest.h>

#include "lla/lla.h"
#include "scratch.hpp"

namespace lla::experiments {
namespace {

RegressionSetting small(int d, int segment, int sequences) {
  return {.length = 128, .d = d, .segment = segment, .sequences = sequences, .scale = 0.3, .seed = 42};
}

RegressionRun request(const Scratch& scratch, std::vector<RegressionSetting> settings) {
  RegressionRun r;
  r.settings = std::move(settings);
  r.out = scratch.path;
  r.command = "test";
  r.checkpoint_seconds = 0;
  return r;
}

constexpr int kSeries = static_cast<int>(kPlainSeries);

// Values of this generator and these models at seed 42, made on 2026-11-15 with the fp64 reference.
TEST(Regression, GoldenValues) {
  const Scratch scratch;
  ASSERT_TRUE(run(request(scratch, {small(8, 32, 4)}), {}).finished);
  const Json file = read_results(scratch.path / kResultsName);
  const double golden[2][kSeries] = {{10.10192, 30.97658, 151147.1, 35.38193, 122.2974},
                                     {42.30814, 49.82809, 129320.9, 51.81717, 122.2974}};
  ASSERT_EQ(file["records"].size(), 2u * kSeries);
  for (int strict = 0; strict < 2; ++strict) {
    for (int model = 0; model < kSeries; ++model) {
      const Json& r = file["records"][strict * kSeries + model];
      EXPECT_EQ(r["model"], kModelNames[model]);
      EXPECT_EQ(r["strict"], strict == 1);
      EXPECT_EQ(r["mse"].size(), 128u);
      EXPECT_NEAR(r["mse_mean"].get<double>(), golden[strict][model], 2e-4 * golden[strict][model])
          << kModelNames[model];
    }
  }
}

TEST(Regression, RecordsHaveTheDocumentedFields) {
  const Scratch scratch;
  ASSERT_TRUE(run(request(scratch, {small(8, 64, 2)}), {}).finished);
  const Json file = read_results(scratch.path / kResultsName);
  const std::vector<std::string> expected = {"task",        "strict",    "d",     "segment", "model",
                                             "ridge",       "scale",     "noise", "kernel",  "qk_norm",
                                             "query_noise", "sequences", "mse",   "mse_mean"};
  for (const Json& r : file["records"]) {
    std::vector<std::string> names;
    for (const auto& [name, value] : r.items()) names.push_back(name);
    EXPECT_EQ(names, expected);
  }
  EXPECT_EQ(file["schema_version"], 1);
  EXPECT_EQ(file["task"], "regression");
  EXPECT_EQ(file["command"], "test");
  // A line of the CSV per record and its header; a line of curves per position.
  const std::string csv = read_file(scratch.path / "results.csv"), curves = read_file(scratch.path / "curves.csv");
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 11);
  EXPECT_EQ(std::count(curves.begin(), curves.end(), '\n'), 129);
}

// Stopped after every batch and started again until it is through: the same file, byte for byte.
TEST(Regression, InterruptedAndContinuedGivesTheSameBytes) {
  const std::vector<RegressionSetting> settings = {small(8, 32, 40), small(16, 128, 20)};
  const Scratch whole, parts;
  ASSERT_TRUE(run(request(whole, settings), {}).finished);
  int runs = 0;
  for (bool finished = false; !finished; ++runs) {
    ASSERT_LT(runs, 20);
    Progress stop_at_once;
    stop_at_once.stop = [] { return true; };
    finished = run(request(parts, settings), stop_at_once).finished;
  }
  EXPECT_GT(runs, 4);  // 3 and 2 batches, so it really was interrupted in the middle of both settings
  EXPECT_EQ(read_file(parts.path / kResultsName), read_file(whole.path / kResultsName));
  EXPECT_EQ(read_file(parts.path / "curves.csv"), read_file(whole.path / "curves.csv"));
  EXPECT_FALSE(fs::exists(parts.path / "partial"));
}

TEST(Regression, ThreadsDoNotMatter) {
  const Scratch one, two;
  lla_set_num_threads(1);
  ASSERT_TRUE(run(request(one, {small(8, 32, 20)}), {}).finished);
  lla_set_num_threads(3);
  ASSERT_TRUE(run(request(two, {small(8, 32, 20)}), {}).finished);
  lla_set_num_threads(0);
  EXPECT_EQ(read_file(one.path / kResultsName), read_file(two.path / kResultsName));
}

TEST(Regression, AFinishedRunIsNotRepeatedAndASweepAddsOnlyWhatIsNew) {
  const Scratch scratch;
  RegressionSetting s = small(8, 32, 2);
  ASSERT_TRUE(run(request(scratch, {s}), {}).finished);
  const std::string before = read_file(scratch.path / kResultsName);
  const RunSummary again = run(request(scratch, {s}), {});
  EXPECT_TRUE(again.finished);
  EXPECT_EQ(again.model_seconds, 0);
  EXPECT_EQ(read_file(scratch.path / kResultsName), before);
  s.ridges = {0.1, 1};
  s.mesa_ridges = {1, 10};
  ASSERT_TRUE(run(request(scratch, {s}), {}).finished);
  const Json file = read_results(scratch.path / kResultsName);
  EXPECT_EQ(file["records"].size(), 2u * kSeries + 4);  // LLA and MesaNet with the other ridge, both forms
  // What was added later is what one run would have given.
  const Scratch at_once;
  ASSERT_TRUE(run(request(at_once, {s}), {}).finished);
  const Json whole = read_results(at_once.path / kResultsName);
  EXPECT_EQ(whole["records"].size(), file["records"].size());
  for (const Json& record : whole["records"]) {
    EXPECT_NE(std::find(file["records"].begin(), file["records"].end(), record), file["records"].end()) << record;
  }
}

TEST(Regression, BadSettingsAreRefusedBeforeAnythingIsWritten) {
  const auto refusal = [](RegressionSetting s) {
    const Scratch scratch;
    RegressionRun r = request(scratch, {s});
    r.out = scratch.path / "new";
    std::string message;
    try {
      run(r, {});
    } catch (const Failure& failure) {
      message = failure.what();
    }
    EXPECT_FALSE(fs::exists(r.out));
    return message;
  };
  EXPECT_EQ(refusal(small(8, 48, 1)), "segment 48 does not divide the sequence length 128");
  EXPECT_EQ(refusal(small(8, 0, 1)), "segment 0 does not divide the sequence length 128");
  EXPECT_EQ(refusal(small(4, 4, 1)), "32 segments need 5 sign bits, more than the dimension 4");
  EXPECT_EQ(refusal(small(7, 32, 1)), "dimension 7 is not an even number from 2 to 256");
  EXPECT_EQ(refusal(small(8, 32, 0)), "0 sequences: at least one is needed");
  RegressionSetting s = small(8, 32, 1);
  s.ridges = {0.1, -1};
  EXPECT_EQ(refusal(s), "ridge -1 is not a finite number >= 0");
  s = small(8, 32, 1);
  s.query_noise = 1.5;
  EXPECT_EQ(refusal(s), "query noise 1.5 is not a number from 0 to 1");
  s = small(8, 32, 1);
  s.noise = std::nan("");
  EXPECT_EQ(refusal(s), "noise nan is not a finite number >= 0");
}

}  // namespace
}  // namespace lla::experiments
