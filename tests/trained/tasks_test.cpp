// The tasks' generators: what every example must be, and golden values; the config files; the corpus's rules.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "experiment.hpp"
#include "tasks/task.hpp"
#include "text/corpus.hpp"
#include "text/digest.hpp"

namespace lla::trained {
namespace {

struct Made {
  Layout layout;
  std::vector<float> features, targets;
  std::vector<int32_t> ids, positions, labels;
};

Made make(const Task& task, uint64_t seed, Part part, int64_t index) {
  Made m;
  m.layout = task.layout();
  const Layout& l = m.layout;
  m.features.assign(l.length * l.features, NAN), m.targets.assign(l.labels * l.targets, NAN);
  m.ids.assign(l.vocabulary > 0 ? l.length : 0, -1), m.positions.assign(l.labels, -1);
  m.labels.assign(l.targets > 0 ? 0 : l.labels, -1);
  task.generate(seed, part, index,
                {m.features.data(), m.ids.data(), m.positions.data(), m.targets.data(), m.labels.data()});
  for (const int32_t p : m.positions) EXPECT_TRUE(p >= l.length - l.tail && p < l.length) << "outside the tail";
  return m;
}

// x such that rows x = right, for d rows of d numbers, by elimination with pivots.
std::vector<double> solve(std::vector<std::vector<double>> a, std::vector<double> b) {
  const size_t d = b.size();
  for (size_t p = 0; p < d; ++p) {
    size_t best = p;
    for (size_t r = p; r < d; ++r) best = std::abs(a[r][p]) > std::abs(a[best][p]) ? r : best;
    std::swap(a[p], a[best]), std::swap(b[p], b[best]);
    for (size_t r = 0; r < d; ++r) {
      if (r == p) continue;
      const double f = a[r][p] / a[p][p];
      for (size_t c = p; c < d; ++c) a[r][c] -= f * a[p][c];
      b[r] -= f * b[p];
    }
  }
  for (size_t p = 0; p < d; ++p) b[p] /= a[p][p];
  return b;
}

TEST(InContext, EverySegmentIsOneMapAndItsQueriesHaveNoiselessLabels) {
  const int64_t d = 4, length = 64, segment = 16;
  const auto task = make_task("in-context", {{"dim", d}, {"length", length}, {"segment", segment}, {"queries", 8}});
  std::set<int> asked;
  for (int64_t index = 0; index < 20; ++index) {
    const Made m = make(*task, 7, Part::test, index);
    std::map<int, std::vector<const float*>> by_cone;  // by the signs of the first two coordinates
    const auto cone = [&](const float* x) { return (x[0] > 0 ? 1 : 0) + (x[1] > 0 ? 2 : 0); };
    int changes = 0;
    for (int64_t i = 0; i < length; ++i) {
      const float* token = &m.features[i * 2 * d];
      by_cone[cone(token)].push_back(token);
      changes += i > 0 && cone(token) != cone(token - 2 * d);
    }
    ASSERT_EQ(by_cone.size(), 4u);
    EXPECT_GT(changes, 20) << "the pairs are not shuffled";
    for (const auto& [c, tokens] : by_cone) ASSERT_EQ(int64_t(tokens.size()), segment);
    for (int64_t q = 0; q < 8; ++q) {
      const float* query = &m.features[(length + q) * 2 * d];
      EXPECT_EQ(m.positions[q], length + q);
      asked.insert(cone(query));
      const auto& tokens = by_cone[cone(query)];
      for (int64_t o = 0; o < d; ++o) {
        EXPECT_EQ(query[d + o], 0);
        std::vector<std::vector<double>> rows;
        std::vector<double> right;
        for (int64_t i = 0; i < d; ++i) {
          rows.emplace_back(tokens[i], tokens[i] + d);
          right.push_back(tokens[i][d + o]);
        }
        const auto map = solve(rows, right);
        const auto check = [&](const float* x, double y) {
          double sum = 0, size = 1;
          for (int64_t j = 0; j < d; ++j) sum += map[j] * x[j], size += std::abs(map[j] * x[j]);
          EXPECT_NEAR(sum, y, 2e-3 * size);
        };
        for (const float* token : tokens) check(token, token[d + o]);
        check(query, m.targets[q * d + o]);
      }
    }
  }
  EXPECT_EQ(asked.size(), 4u);
}

TEST(InContext, NoiseIsInTrainingOnlyAndOfItsSize) {
  const Json clean = {{"length", 128}, {"segment", 32}, {"noise", 0.0}}, noisy = {{"length", 128}, {"segment", 32}};
  const auto a = make_task("in-context", clean), b = make_task("in-context", noisy);
  double squares = 0, maps = 0;
  int64_t count = 0;
  for (int64_t index = 0; index < 8; ++index) {
    const Made x = make(*a, 1, Part::training, index), y = make(*b, 1, Part::training, index);
    for (int64_t i = 0; i < 128 * 64; ++i) {
      const double difference = y.features[i] - x.features[i];
      if (i % 64 < 32)
        EXPECT_EQ(difference, 0);
      else
        squares += difference * difference, maps += double(x.features[i]) * x.features[i], ++count;
    }
    EXPECT_EQ(x.targets, y.targets);
    EXPECT_EQ(make(*a, 1, Part::test, index).features, make(*b, 1, Part::test, index).features);
  }
  EXPECT_NEAR(std::sqrt(squares / double(count)), 0.1, 0.002);
  EXPECT_NEAR(maps / double(count), 1, 0.1);  // A ~ N(0, I/d), |x|^2 about d
}

TEST(Tasks, AnExampleIsAFunctionOfSeedPartAndIndex) {
  for (const char* name : {"in-context", "recall", "state-tracking"}) {
    const auto task = make_task(name, Json::object());
    const auto same = [&](const Made& a, const Made& b) { return a.features == b.features && a.ids == b.ids; };
    const Made first = make(*task, 3, Part::training, 5);
    make(*task, 3, Part::training, 6);
    EXPECT_TRUE(same(first, make(*task, 3, Part::training, 5))) << name;
    EXPECT_FALSE(same(first, make(*task, 3, Part::training, 6))) << name;
    EXPECT_FALSE(same(first, make(*task, 4, Part::training, 5))) << name;
    EXPECT_FALSE(same(first, make(*task, 3, Part::validation, 5))) << name;
    EXPECT_FALSE(same(make(*task, 3, Part::test, 5), make(*task, 3, Part::validation, 5))) << name;
  }
}

// A change of these numbers is a change of every result: the data of all runs would be other data.
TEST(Tasks, GoldenValues) {
  const Made a = make(*make_task("in-context", {{"length", 64}, {"segment", 16}}), 1, Part::training, 12345);
  EXPECT_NEAR(a.features[0], -0.14394478, 1e-5);
  EXPECT_NEAR(a.features[63 * 64 + 40], 0.7222283, 1e-5);
  EXPECT_NEAR(a.targets[15 * 32 + 31], -1.9793952, 1e-5);
  const Made b = make(*make_task("recall", {{"length", 64}, {"pairs", 4}}), 1, Part::training, 12345);
  EXPECT_EQ(std::vector<int32_t>(b.ids.begin(), b.ids.begin() + 12),
            (std::vector<int32_t>{1672, 7850, 3903, 7749, 179, 6069, 2202, 4287, 2202, 5540, 1672, 2702}));
  EXPECT_EQ(b.positions, (std::vector<int32_t>{10, 12, 28, 8}));
  const Made c = make(*make_task("state-tracking", {{"items", 16}}), 1, Part::test, 7);
  EXPECT_EQ(c.labels, (std::vector<int32_t>{2695, 860, 1478, 5893, 1060, 6198, 5630, 4046}));
  EXPECT_EQ(c.positions.front(), 80);
}

TEST(Recall, EveryKeyIsQueriedOnceAndItsLabelIsItsValue) {
  for (const char* values : {"many-to-one", "distinct"}) {
    for (const int64_t pairs : {4, 16}) {
      const auto task = make_task("recall", {{"length", 64}, {"pairs", pairs}, {"values", values}});
      for (int64_t index = 0; index < 50; ++index) {
        const Made m = make(*task, 2, Part::training, index);
        std::map<int32_t, int32_t> stored;
        for (int64_t i = 0; i < pairs; ++i) {
          EXPECT_TRUE(m.ids[2 * i] >= 1 && m.ids[2 * i] < 4096);
          EXPECT_TRUE(m.ids[2 * i + 1] >= 4096 && m.ids[2 * i + 1] < 8192);
          stored[m.ids[2 * i]] = m.ids[2 * i + 1];
        }
        EXPECT_EQ(int64_t(stored.size()), pairs) << "keys are distinct";
        std::set<int32_t> places, queried;
        for (int64_t i = 0; i < pairs; ++i) {
          const int32_t at = m.positions[i];
          EXPECT_TRUE(at >= 2 * pairs && at < 64 && at % 2 == 0);
          EXPECT_EQ(stored.at(m.ids[at]), m.labels[i]);
          places.insert(at), queried.insert(m.ids[at]);
        }
        EXPECT_EQ(int64_t(places.size()), pairs);
        EXPECT_EQ(int64_t(queried.size()), pairs);
      }
    }
  }
}

TEST(Recall, SlotsFollowThePowerLaw) {
  const int64_t pairs = 4, slots = 12;
  const auto task = make_task("recall", {{"length", 32}, {"pairs", pairs}});
  std::vector<double> seen(slots, 0);
  const int64_t n = 20000;
  for (int64_t index = 0; index < n; ++index) {
    const Made m = make(*task, 1, Part::training, index);
    ++seen[(m.positions[0] - 2 * pairs) / 2];
  }
  double total = 0;
  for (int64_t gap = 1; gap <= slots; ++gap) total += std::pow(double(gap), -0.99);
  for (int64_t gap = 1; gap <= slots; ++gap) {
    const double p = std::pow(double(gap), -0.99) / total;
    EXPECT_NEAR(seen[gap - 1] / double(n), p, 5 * std::sqrt(p / double(n))) << gap;
  }
}

TEST(Recall, ValuesRepeatOnlyWhereManyToOne) {
  for (const bool distinct : {false, true}) {
    const auto task = make_task("recall", {{"length", 64},
                                           {"pairs", 16},
                                           {"vocabulary", 64},
                                           {"values", distinct ? "distinct" : "many-to-one"},
                                           {"filler", "zero"}});
    int64_t repeats = 0;
    for (int64_t index = 0; index < 50; ++index) {
      const Made m = make(*task, 1, Part::training, index);
      repeats += 16 - int64_t(std::set<int32_t>(m.labels.begin(), m.labels.end()).size());
      for (int64_t i = 33; i < 64; i += 2) EXPECT_EQ(m.ids[i], 0);  // the second token of a slot
    }
    EXPECT_EQ(repeats == 0, distinct);
  }
}

TEST(StateTracking, LabelsAreWhatTheSwapsLeave) {
  for (const char* padding : {"left", "right"}) {
    for (const char* answers : {"shown", "hidden"}) {
      const int64_t n = 16, alphabet = 50, hash = alphabet + n, equals = hash + 1, comma = hash + 2, pad = hash + 3;
      const auto task = make_task("state-tracking",
                                  {{"items", n}, {"alphabet", alphabet}, {"padding", padding}, {"answers", answers}});
      std::map<int64_t, int> swaps_seen;
      int64_t fixed = 0;
      for (int64_t index = 0; index < 100; ++index) {
        const Made m = make(*task, 1, Part::training, index);
        size_t at = 0;
        while (std::string(padding) == "left" && m.ids[at] == pad) ++at;
        std::vector<int32_t> state;
        for (int64_t p = 0; p < n; ++p, at += 4) {
          EXPECT_EQ(m.ids[at], alphabet + p);
          EXPECT_EQ(m.ids[at + 1], equals);
          state.push_back(m.ids[at + 2]);
          EXPECT_LT(state.back(), alphabet);
          EXPECT_EQ(m.ids[at + 3], p + 1 < n ? comma : hash);
        }
        int64_t swaps = 0;
        for (bool more = true; more; at += 3, ++swaps) {
          const int64_t i = m.ids[at] - alphabet, j = m.ids[at + 1] - alphabet;
          ASSERT_TRUE(i >= 0 && i < n && j >= 0 && j < n);
          fixed += i == j;
          std::swap(state[i], state[j]);
          more = m.ids[at + 2] == comma;
          EXPECT_EQ(m.ids[at + 2], more ? comma : hash);
        }
        ++swaps_seen[swaps];
        std::set<int32_t> asked;
        for (int64_t q = 0; q < 8; ++q, at += 4) {
          asked.insert(m.ids[at]);
          EXPECT_EQ(m.ids[at + 1], equals);
          EXPECT_EQ(m.positions[q], int32_t(at + 1));
          EXPECT_EQ(m.labels[q], state[m.ids[at] - alphabet]);
          if (q == 7) continue;
          EXPECT_EQ(m.ids[at + 2], std::string(answers) == "shown" ? m.labels[q] : pad);
          EXPECT_EQ(m.ids[at + 3], comma);
        }
        EXPECT_EQ(asked.size(), 8u);
      }
      EXPECT_EQ(swaps_seen.size(), 3u);  // 16/6 = 2.7 to 16/3 = 5.3
      EXPECT_EQ(swaps_seen.begin()->first, 3);
      EXPECT_GT(fixed, 0);  // i = j is allowed
    }
  }
}

TEST(Tasks, WhatATaskDoesNotHaveIsRefusedByName) {
  const auto refusal = [](const char* task, const Json& settings) -> std::string {
    try {
      make_task(task, settings);
    } catch (const Failure& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(refusal("recall", {{"pears", 4}}).find("\"pears\""), std::string::npos);
  EXPECT_NE(refusal("recall", {{"length", 64}, {"pairs", 17}}).find("from 1 to 16"), std::string::npos);
  EXPECT_NE(refusal("in-context", {{"length", 64}, {"segment", 24}}).find("\"segment\""), std::string::npos);
  EXPECT_NE(refusal("in-context", {{"length", "64"}}).find("\"length\""), std::string::npos);
  EXPECT_NE(refusal("state-tracking", {{"padding", "middle"}}).find("left, right"), std::string::npos);
  EXPECT_NE(refusal("chess", Json::object()).find("no task"), std::string::npos);
}

TEST(Experiments, TheConfigsListTheIssuesRuns) {
  const Experiment recall = make_experiment(builtin_config("recall"), {});
  EXPECT_EQ(recall.stacks.size(), 12u * 6 * 2);  // settings, models, first and further seeds
  EXPECT_EQ(recall.stacks[0].runs.size(), 3u);
  EXPECT_EQ(recall.stacks[0].training.examples, 20000);
  EXPECT_EQ(steps_of(recall.stacks[0].training), 32 * 78);
  Subset paper;
  paper.variant = "paper";
  const Experiment all = make_experiment(builtin_config("in-context"), paper);
  EXPECT_EQ(all.stacks.size(), 16u * 6);
  EXPECT_EQ(all.stacks[0].runs.size(), 12u);
  EXPECT_EQ(all.stacks[0].training.epochs, 100);
  Subset plateau;
  plateau.variant = "plateau";
  const Experiment jumps = make_experiment(builtin_config("recall"), plateau);
  ASSERT_EQ(jumps.stacks.size(), 3u * 3);  // numbers of examples, models; one seed
  std::set<int64_t> examples;
  for (const Stack& stack : jumps.stacks) {
    EXPECT_EQ(stack.runs.size(), 3u);
    EXPECT_EQ(stack.task_options["pairs"], 16);
    examples.insert(stack.training.examples);
  }
  EXPECT_EQ(examples, (std::set<int64_t>{20000, 40000, 60000}));
  EXPECT_THROW(make_experiment(builtin_config("in-context"), plateau), Failure);
  for (const std::string& name : builtin_names()) {
    Subset quick;
    quick.variant = "quick";
    const auto config = builtin_config(name);
    EXPECT_FALSE(make_experiment(config, quick).stacks.empty()) << name;
  }
}

TEST(Experiments, SubsetsAndAssignments) {
  Subset s;
  s.models = {"lla"}, s.lengths = {64}, s.pairs = {8}, s.seeds = {1}, s.epochs = 2;
  s.assignments = {"training.warmup=7", "model.ridge_min=0.001"};
  const Experiment e = make_experiment(builtin_config("recall"), s);
  ASSERT_EQ(e.stacks.size(), 1u);
  EXPECT_EQ(e.stacks[0].training.warmup, 7);
  EXPECT_EQ(e.stacks[0].training.epochs, 2);
  EXPECT_EQ(e.stacks[0].model_options["ridge_min"], 0.001);
  EXPECT_EQ(e.stacks[0].name(), "recall-length64-pairs8-examples40000-lla");
  s.assignments = {"training.warm=7"};
  EXPECT_THROW(make_experiment(builtin_config("recall"), s), Failure);
  s.assignments = {}, s.pairs = {5};
  EXPECT_THROW(make_experiment(builtin_config("recall"), s), Failure);
}

TEST(Experiments, TheLanguageModelsBudgets) {
  const Experiment all = make_experiment(builtin_config("language-model"), {});
  // control: 2; steps: 4 models with their rates, one beyond the edge and the other seeds; time: 3
  ASSERT_EQ(all.stacks.size(), 2u + 4 * 3 + 3);
  for (const Stack& stack : all.stacks) {
    if (stack.setting["budget"] != "time") continue;
    EXPECT_EQ(stack.runs_from, RunsFrom::best_of_other);
    EXPECT_EQ(stack.rates_of["budget"], "steps");
    EXPECT_EQ(stack.rates_of["model"], stack.model);
    EXPECT_EQ(stack.most_runs(), 3u);
    // No run beyond 1.2 epochs of 75.27 MB.
    EXPECT_LT(steps_of(stack.training) * stack.training.batch * 1024, 1.2 * 75'269'318);
  }
  Subset only;
  only.models = {"lla"};
  for (const Stack& stack : make_experiment(builtin_config("language-model"), only).stacks) {
    EXPECT_EQ(stack.model, "lla");
    EXPECT_NE(stack.setting["budget"], "time");  // it is LLA's own time
  }
  only.models = {}, only.learning_rates = {1e-3, 2e-3};
  for (const Stack& stack : make_experiment(builtin_config("language-model"), only).stacks) {
    EXPECT_NE(stack.runs_from, RunsFrom::edge) << "only these rates were asked for";
  }
  EXPECT_EQ(rate_beyond_edge({5e-4, 2e-3, 1e-3}, 2e-3), 4e-3);
  EXPECT_EQ(rate_beyond_edge({5e-4, 2e-3, 1e-3}, 5e-4), 2.5e-4);
  EXPECT_EQ(rate_beyond_edge({5e-4, 2e-3, 1e-3}, 1e-3), std::nullopt);
  EXPECT_EQ(rate_beyond_edge({5e-4, 2e-3, 1e-3}, 4e-3), std::nullopt);  // one more, not two
  EXPECT_EQ(rate_beyond_edge({1e-3}, 1e-3), std::nullopt);
}

TEST(Digest, KnownAnswers) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(crc32("123456789"), 0xcbf43926u);
}

TEST(Corpus, SharedWindowsAreCounted) {
  std::string training(1000, ' '), other(1000, ' ');
  for (size_t i = 0; i < 1000; ++i) training[i] = char('a' + i * i % 23), other[i] = char('A' + i * i % 19);
  const std::string half = training.substr(100, 500) + other.substr(0, 500);
  const auto shares = shared_windows({training, other, half, "short"}, {training});
  EXPECT_EQ(shares[0], 1);
  EXPECT_EQ(shares[1], 0);
  EXPECT_NEAR(shares[2], 437.0 / 937, 0.1);  // both texts have a period: some windows occur more than once
  EXPECT_EQ(shares[3], 1);
}

}  // namespace
}  // namespace lla::trained
