// Files: whole or not at all, and a sentence for everything that can be wrong with them.
#include "common/results.hpp"

#include <csignal>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "regression/checkpoint.hpp"
#include "regression/run.hpp"
#include "scratch.hpp"

namespace lla::experiments {
namespace {

template <class F>
std::string failure(F&& f) {
  try {
    f();
  } catch (const Failure& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Results open(const Scratch& s, uint64_t seed = 1, const std::string& task = "regression") {
  return Results(s.path, task, {{"seed", seed}}, "test");
}

TEST(WriteAtomically, ReplacesTheWholeFile) {
  const Scratch s;
  write_atomically(s.path / "file", "a long first content");
  write_atomically(s.path / "file", "short");
  EXPECT_EQ(read_file(s.path / "file"), "short");
  EXPECT_EQ(std::distance(fs::directory_iterator(s.path), {}), 1);
}

// A limit on the file size fails the write half-way, as a full disk does.
TEST(WriteAtomically, AFailedWriteLeavesTheOldFileAndNothingElse) {
  const Scratch s;
  write_atomically(s.path / "file", "earlier results");
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit tiny{.rlim_cur = 1000, .rlim_max = old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &tiny);
  const std::string message = failure([&] { write_atomically(s.path / "file", std::string(5000, 'x')); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_TRUE(contains(message, "could not be written: ")) << message;
  EXPECT_TRUE(contains(message, "earlier results are untouched")) << message;
  EXPECT_EQ(read_file(s.path / "file"), "earlier results");
  EXPECT_EQ(std::distance(fs::directory_iterator(s.path), {}), 1);
}

TEST(Results, AnUnwritableDirectoryIsRefusedAtOnce) {
  const Scratch s;
  write_file(s.path / "file", "");
  const std::string message = failure([&] { Results(s.path / "file" / "below", "regression", {}, ""); });
  EXPECT_TRUE(contains(message, "file/below could not be made: ")) << message;
}

TEST(Results, AHalfWrittenFileIsRefusedAndLeftAlone) {
  const Scratch s;
  write_file(s.path / kResultsName, "{\"schema_version\": 1, \"records\": [");
  EXPECT_TRUE(contains(failure([&] { open(s); }), "is not complete JSON (half-written?)"));
  EXPECT_EQ(read_file(s.path / kResultsName), "{\"schema_version\": 1, \"records\": [");
}

TEST(Results, AnotherVersionTaskSettingOrFileIsRefusedAndLeftAlone) {
  const Scratch s;
  open(s).write();
  const std::string good = read_file(s.path / kResultsName);
  EXPECT_EQ(failure([&] { open(s); }), "");
  EXPECT_TRUE(contains(failure([&] { open(s, 2); }), "was made with settings {\"seed\":1}, this run has {\"seed\":2}"));
  EXPECT_TRUE(
      contains(failure([&] { open(s, 1, "rates"); }), "was made with task \"regression\", this run has \"rates\""));
  EXPECT_EQ(read_file(s.path / kResultsName), good);
  std::string other = good;
  other.replace(other.find("\"schema_version\": 1"), 19, "\"schema_version\": 7");
  write_file(s.path / kResultsName, other);
  EXPECT_TRUE(contains(failure([&] { open(s); }), "has schema version 7, this program reads version 1"));
  EXPECT_EQ(read_file(s.path / kResultsName), other);
  write_file(s.path / kResultsName, "{\"hello\": 1}");
  EXPECT_TRUE(
      contains(failure([&] { open(s); }), "is not a results file of this program: it has no \"schema_version\""));
}

TEST(Checkpoint, SurvivesTheFileBitForBit) {
  const Scratch s;
  const RegressionSetting setting{.length = 4, .d = 8, .segment = 4, .sequences = 9};
  Sums sums(4);
  sums.sequences = 5;
  double x = 0.1;
  for (auto& form : sums.error) {
    for (auto& model : form) {
      for (double& e : model) e = x = x * 1.7 + 1e-17;
    }
  }
  write_checkpoint(s.path / "c", setting, sums);
  const Sums back = read_checkpoint(s.path / "c", setting);
  EXPECT_EQ(back.sequences, 5);
  EXPECT_EQ(back.error, sums.error);
  EXPECT_EQ(read_checkpoint(s.path / "absent", setting).sequences, 0);
}

TEST(Checkpoint, ADamagedOrForeignOneIsRefused) {
  const Scratch s;
  RegressionSetting setting{.length = 4, .d = 8, .segment = 4, .sequences = 9};
  write_checkpoint(s.path / "c", setting, Sums(4));
  setting.noise = 0.5;
  EXPECT_TRUE(contains(failure([&] { read_checkpoint(s.path / "c", setting); }), "belongs to another setting"));
  setting.noise = 0.1;
  Json file = read_json(s.path / "c");
  file["sums"][0][0].push_back(1.0);
  write_file(s.path / "c", file.dump());
  EXPECT_TRUE(contains(failure([&] { read_checkpoint(s.path / "c", setting); }), "is damaged"));
}

}  // namespace
}  // namespace lla::experiments
