// Files: whole or not at all, and a sentence for everything that can be wrong with them.
#include "common/results.hpp"

#include <csignal>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "regression/checkpoint.hpp"
#include "regression/curves.hpp"
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

TEST(ShellWords, CanBePasted) {
  const std::vector<std::string> plain = {"lla",   "reproduce", "recall", "--set", "training.warmup=0",
                                          "--out", "out/a_b-1"};
  EXPECT_EQ(shell_words(plain), "lla reproduce recall --set training.warmup=0 --out out/a_b-1");
  const std::vector<std::string> odd = {"--set", R"(settings=[{"length":16,"pairs":4}])", "", "it's", "a b", "$HOME",
                                        "~"};
  EXPECT_EQ(shell_words(odd), R"(--set 'settings=[{"length":16,"pairs":4}]' '' 'it'\''s' 'a b' '$HOME' '~')");
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

// A link under a name one could foresee is somebody else's file: it is neither followed nor removed.
TEST(WriteAtomically, FollowsNoLinks) {
  const Scratch s;
  write_file(s.path / "precious", "mine");
  for (const char* name : {"file.tmp", ".probe", ".probe.tmp", ".lla-aaaaaa"})
    fs::create_symlink("precious", s.path / name);
  fs::create_symlink("precious", s.path / "file");  // the target itself: the link is replaced, not what it points to
  write_atomically(s.path / "file", "new");
  require_writable_folder(s.path);
  EXPECT_EQ(read_file(s.path / "precious"), "mine");
  EXPECT_EQ(read_file(s.path / "file"), "new");
  EXPECT_FALSE(fs::is_symlink(s.path / "file"));
  EXPECT_TRUE(fs::is_symlink(s.path / ".probe"));
  EXPECT_EQ(fs::status(s.path / "file").permissions() & fs::perms::owner_all,
            fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("precious", s.path / ".lock");
  EXPECT_TRUE(contains(failure([&] { open(s); }), ".lock could not be written"));
  EXPECT_EQ(read_file(s.path / "precious"), "mine");
}

// Two processes: while one has the folder the other is refused by name, and when it is gone, however, the folder is
// free.
TEST(Results, OneRunAtATimeInAFolder) {
  const Scratch s;
  int ready[2], done[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  char byte = 0;
  if (child == 0) {
    [[maybe_unused]] const Results mine = open(s);
    if (write(ready[1], "r", 1) == 1 && read(done[0], &byte, 1) == 1) kill(getpid(), SIGKILL);
    _exit(1);
  }
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const std::string message = failure([&] { open(s); });
  EXPECT_TRUE(contains(message, "another run (process " + std::to_string(child) + ") is at work in " + s.path.string()))
      << message;
  ASSERT_EQ(write(done[1], "d", 1), 1);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(failure([&] { open(s); }), "");
  EXPECT_EQ(failure([&] { open(s); }), "");  // and again: the last one let go
}

TEST(Results, WhatAKilledRunLeftHalfWrittenGoes) {
  const Scratch s;
  open(s).write();
  write_file(s.path / ".lla-a1B2c3", "half of a fi");
  write_file(s.path / ".lla-mine", "not of that form");
  open(s);
  EXPECT_FALSE(fs::exists(s.path / ".lla-a1B2c3"));
  EXPECT_TRUE(fs::exists(s.path / ".lla-mine"));
}

// ---- damage, field by field ----------------------------------------------------------------------------------------

// Every field of every record, and everything beside the records, gone or of another type: accepted or refused with one
// sentence that names the file, never another exception.
TEST(Results, OneBentFieldIsASentence) {
  const Scratch s;
  RegressionSetting setting{.length = 4, .d = 8, .segment = 4, .sequences = 9};
  Sums sums(4);
  sums.sequences = 9;
  Results results(s.path, "regression", {{"length", 4}}, "test");
  for (Json& record : to_records(setting, series(setting), sums)) results.add(std::move(record));
  results.write();
  const fs::path path = s.path / kResultsName;
  const Json good = read_results(path);
  const Json values[] = {nullptr, true, -1, 1.5, 1e300, "text", Json::array(), Json::object(), {1.0, "x", 2.0, 3.0}};
  int refused = 0;
  const auto try_one = [&](const Json& bent, const std::string& what) {
    write_file(path, bent.dump());
    const std::string message = failure([&] {
      const Json file = read_results(path);
      write_curves(s.path, file["records"]);
    });
    if (message.empty()) return;
    ++refused;
    EXPECT_TRUE(contains(message, path.string())) << message;
    EXPECT_TRUE(contains(message, what)) << message << " for " << what;
  };
  for (const auto& [name, unused] : good.items()) {
    Json bent = good;
    bent.erase(name);
    try_one(bent, name);
    for (const Json& value : values) {
      bent[name] = value;
      try_one(bent, name == "records" || name == "settings" ? "" : name == "schema_version" ? "schema version" : name);
    }
  }
  for (const auto& [name, unused] : good["records"][0].items()) {
    Json bent = good;
    bent["records"][3].erase(name);
    try_one(bent, name);
    for (const Json& value : values) {
      bent["records"][3][name] = value;
      try_one(bent, name);
    }
  }
  for (const Json& value : values) {
    Json bent = good;
    bent["records"].push_back(value);
    try_one(bent, "record 11");
  }
  EXPECT_GT(refused, 100);
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

TEST(Checkpoint, ImpossibleCountsAreRefused) {
  const Scratch s;
  const RegressionSetting setting{.length = 4, .d = 8, .segment = 4, .sequences = 9};
  write_checkpoint(s.path / "c", setting, Sums(4));
  const Json good = read_json(s.path / "c");
  for (const Json& count : {Json(10), Json(1000000), Json(-1), Json(2.5), Json(1e300), Json("5"), Json(nullptr),
                            Json(true), Json(UINT64_MAX), Json::array()}) {
    Json bent = good;
    bent["sequences_done"] = count;
    write_file(s.path / "c", bent.dump());
    const std::string message = failure([&] { read_checkpoint(s.path / "c", setting); });
    EXPECT_TRUE(contains(message, "has done " + count.dump() + " of 9 sequences; delete it")) << message;
  }
  for (const Json& count : {Json(0), Json(9)}) {
    Json bent = good;
    bent["sequences_done"] = count;
    write_file(s.path / "c", bent.dump());
    EXPECT_EQ(failure([&] { read_checkpoint(s.path / "c", setting); }), "");
  }
  for (const Json& sum : {Json(-1), Json(nullptr), Json("x")}) {
    Json bent = good;
    bent["sums"][1][2][3] = sum;
    write_file(s.path / "c", bent.dump());
    EXPECT_TRUE(contains(failure([&] { read_checkpoint(s.path / "c", setting); }), "is damaged")) << sum.dump();
  }
  for (const char* text : {"[]", "3", "null", "{}", "{\"schema_version\": [1]}", "{\"schema_version\": 1e999}"}) {
    write_file(s.path / "c", text);
    EXPECT_NE(failure([&] { read_checkpoint(s.path / "c", setting); }), "") << text;
  }
}

}  // namespace
}  // namespace lla::experiments
