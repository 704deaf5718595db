#include "train/queue.hpp"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

#include <fmt/core.h>

#include "text/language.hpp"
#include "train/model_options.hpp"
#include "train/stack_trainer.hpp"

namespace lla::trained {
namespace {

using Clock = std::chrono::steady_clock;

// A run has flattened when its validation score changed by less than 1 % over its last fifth.
bool flattened(const Json& epochs) {
  const size_t n = epochs.size(), from = n - 1 - std::max<size_t>(1, n / 5);
  if (n < 3) return false;
  const double before = epochs[from]["validation"], after = epochs[n - 1]["validation"];
  return std::abs(after - before) < 0.01 * std::max(std::abs(before), 1e-30);
}

// `tokens`: of a sequence, the record's length where the setting has none (state tracking, the language model).
Json record_of(const Stack& stack, const RunState& run, const StackTrainer& trainer, int64_t tokens, bool accuracy,
               const std::string& device) {
  Json r = stack.identity();
  if (!r.contains("length")) r["length"] = tokens;
  Json loss = Json::array(), validation = Json::array(), test = Json::array();
  size_t best = 0, best_on_test = 0;
  const auto better = [&](double a, double b) { return accuracy ? a > b : a < b; };
  for (size_t i = 0; i < run.epochs.size(); ++i) {
    const Json& e = run.epochs[i];
    loss.push_back(e["loss"]), validation.push_back(e["validation"]);
    if (e.contains("test")) test.push_back(e["test"]);
    if (better(validation[i], validation[best])) best = i;
    if (e.contains("test") && better(test[i], test[best_on_test])) best_on_test = i;
  }
  const Training& t = stack.training;
  r.update({{"learning_rate", run.run.learning_rate},
            {"seed", run.run.seed},
            {"steps", run.steps},
            {"steps_planned", steps_of(t)},
            {"seconds", run.seconds},
            {"milliseconds_a_step", run.steps > 0 ? 1e3 * run.seconds / double(run.steps) : 0},
            {"stacked", stack.runs.size()},
            {"ended", run.ended},
            {"parameters", trainer.model().parameters().count()},
            {"precision", trainer.compute() == at::kBFloat16 ? "bf16" : "f32"},
            {"device", device},
            {"rows", run.rows},
            {"loss", loss},
            {"validation", validation},
            {"test", test}});
  const char* name = accuracy ? "test_accuracy" : "test_error";
  const bool tested = !test.empty();
  r["flattened"] = !run.epochs.empty() && flattened(run.epochs);
  r["best_epoch"] = run.epochs.empty() ? Json() : Json(best + 1);
  r["validation_best"] = validation.empty() ? Json() : validation[best];
  r[name] = tested ? test[best] : Json();                                           // epoch chosen on validation
  r[std::string(name) + "_chosen_on_test"] = tested ? test[best_on_test] : Json();  // the paper's choice
  r.update(run.extra);
  return r;
}

class Queue {
 public:
  Queue(const Experiment& experiment, const QueueOptions& options, const std::function<bool()>& interrupted)
      : options_(options),
        interrupted_(interrupted),
        results_(options.out, experiment.stacks[0].task, experiment.config, options.command, machine(options.devices)),
        waiting_(experiment.stacks.begin(), experiment.stacks.end()) {
    results_.write();
  }

  bool run() {
    std::vector<std::thread> threads;
    std::exception_ptr error;
    const auto work = [&](const at::Device& device) {
      try {
        this->work(device);
      } catch (...) {
        const std::lock_guard lock(guard_);
        if (!error) error = std::current_exception();
        failed_ = true;
      }
    };
    for (size_t i = 1; i < options_.devices.size(); ++i) threads.emplace_back(work, options_.devices[i]);
    work(options_.devices[0]);
    for (auto& t : threads) t.join();
    if (error) std::rethrow_exception(error);
    return waiting_.empty() && !cut_;
  }

 private:
  static Json machine(const std::vector<at::Device>& devices) {
    Json m = experiments::machine(experiments::Device::cpu);
    if (devices[0].is_cuda()) m["gpu"] = device_name(devices[0]);
    return m;
  }

  bool stop() const {
    return failed_ || interrupted_() ||
           (options_.seconds > 0 && std::chrono::duration<double>(Clock::now() - start_).count() > options_.seconds);
  }

  // The next stack that can begin, with its runs known and those that are done left out. Empty when there is none.
  std::optional<Stack> next() {
    const std::lock_guard lock(guard_);
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      Stack stack = *it;
      if (stack.runs_from != RunsFrom::config) {
        if (busy_.count(stack.rates_of.dump()) > 0) {  // what it waits for is being trained elsewhere
          ++it;
          continue;
        }
        stack.runs = following_runs(stack);
      }
      bool done = true;
      for (const Run& run : stack.runs) done = done && results_.contains(identity(stack, run));
      it = waiting_.erase(it);
      if (done) continue;
      busy_.insert(stack.identity().dump());
      return stack;
    }
    return {};
  }

  // The runs of a stack that follows from others; none where those failed, or ask for no more.
  std::vector<Run> following_runs(const Stack& stack) const {
    const Json* best = best_record(results_.records(), stack.rates_of, scored_by_accuracy(stack.task));
    if (best == nullptr) return {};
    const double rate = (*best)["learning_rate"];
    const Training& t = stack.training;
    if (stack.runs_from == RunsFrom::edge) {
      const auto beyond = rate_beyond_edge(t.learning_rates, rate);
      return beyond ? std::vector<Run>{{*beyond, t.seeds[0]}} : std::vector<Run>{};
    }
    std::vector<Run> runs;
    for (size_t i = stack.runs_from == RunsFrom::best ? 1 : 0; i < t.seeds.size(); ++i) {
      runs.push_back({rate, t.seeds[i]});
    }
    return runs;
  }

  bool waiting_empty() {
    const std::lock_guard lock(guard_);
    return waiting_.empty();
  }

  static Json identity(const Stack& stack, const Run& run) {
    Json id = stack.identity();
    id.update({{"learning_rate", run.learning_rate}, {"seed", run.seed}});
    return id;
  }

  void work(const at::Device& device) {
    const DeviceScope scope(device);
    at::init_num_threads();                            // this thread's share, where the caller set one
    std::deque<std::pair<std::string, Sources>> made;  // data of the last settings: models share it
    // However short the time: every piece of a queue gets some steps done, or pieces could follow one another for ever.
    for (bool begun = false; !(begun ? stop() : failed_ || interrupted_()); begun = true) {
      std::optional<Stack> stack = next();
      if (!stack) {
        if (waiting_empty()) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(200));  // for the first seed, on another device
        continue;
      }
      train(*stack, device, made);
      const std::lock_guard lock(guard_);
      busy_.erase(stack->identity().dump());
    }
  }

  void train(const Stack& stack, const at::Device& device, std::deque<std::pair<std::string, Sources>>& made) {
    const bool language = stack.task == "language-model";
    Layout layout;
    TrainerOptions options{device, options_.captured, options_.out, options_.checkpoint_seconds, {}};
    std::shared_ptr<const Task> task;
    if (language)
      layout = language_layout(stack.task_options);
    else
      task = make_task(stack.task, stack.task_options), layout = task->layout();
    Sources sources = data(stack, task, device, made);
    if (language) options.at_end = language_evaluation(stack, device);
    StackTrainer trainer(stack, model_config(stack.task, stack.model, layout, stack.model_options), sources, options);
    const auto look = [&](const Glance& g) { show(stack, g); };
    if (!trainer.train([this] { return stop(); }, look)) {
      cut_ = true;
      return;
    }
    const std::lock_guard lock(guard_);
    for (const RunState& run : trainer.runs()) {
      const std::string on = device.is_cuda() ? device_name(device) : "cpu";
      if (!results_.contains(identity(stack, run.run))) {
        results_.add(record_of(stack, run, trainer, layout.length, sources.accuracy, on));
      }
    }
    results_.write();
    trainer.forget_checkpoint();
  }

  Sources data(const Stack& stack, const std::shared_ptr<const Task>& task, const at::Device& device,
               std::deque<std::pair<std::string, Sources>>& made) const {
    const Training& t = stack.training;
    const bool bf16 = t.precision == "bf16" || (t.precision == "auto" && device.is_cuda());
    std::vector<uint64_t> seeds;
    for (const Run& run : stack.runs) {
      if (std::find(seeds.begin(), seeds.end(), run.seed) == seeds.end()) seeds.push_back(run.seed);
    }
    const std::string key = Json{stack.task_options, seeds, t.examples, t.validation, t.test, bf16, stack.task}.dump();
    for (const auto& [name, sources] : made) {
      if (name == key) return sources;
    }
    Sources s;
    s.accuracy = scored_by_accuracy(stack.task);
    if (stack.task == "language-model") {
      s = language_sources(stack, device);
    } else {
      const auto type = bf16 ? at::kBFloat16 : at::kFloat;
      const auto make = [&](Part part, int64_t count) -> std::shared_ptr<const Source> {
        return make_examples(task, seeds, part, count, device, type, options_.threads);
      };
      if (made.size() >= 2) made.pop_front();
      s.training = make(Part::training, t.examples);
      s.validation = make(Part::validation, t.validation);
      s.test = make(Part::test, t.test);
    }
    made.emplace_back(key, s);
    return s;
  }

  void show(const Stack& stack, const Glance& g) {
    const std::lock_guard lock(guard_);
    const bool terminal = ::isatty(2) != 0, epoch = g.step == g.steps;
    if (!terminal && !epoch) return;
    const std::string line =
        fmt::format("{}: epoch {}/{} step {}/{}, {} runs left, loss {:.4g}, {} {:.4g}, {:.1f} steps/s, {:.0f} s left",
                    stack.name(), g.epoch, g.epochs, g.step, g.steps, g.active, g.loss,
                    scored_by_accuracy(stack.task) ? "accuracy" : "error", g.score, g.steps_per_second, g.seconds_left);
    if (terminal)
      fmt::print(stderr, "\r\033[K{}{}", line, epoch ? "\n" : "");
    else
      fmt::print(stderr, "{}\n", line);
    std::fflush(stderr);
  }

  const QueueOptions& options_;
  const std::function<bool()>& interrupted_;
  experiments::Results results_;
  std::deque<Stack> waiting_;
  std::set<std::string> busy_;
  std::mutex guard_;
  std::atomic<bool> cut_ = false, failed_ = false;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

const Json* best_record(const Json& records, const Json& identity, bool accuracy) {
  const Json* best = nullptr;
  for (const Json& r : records) {
    if (!experiments::Results::matches(r, identity) || r["validation_best"].is_null()) continue;
    const auto value = [](const Json& record) { return record["validation_best"].get<double>(); };
    if (best == nullptr || (accuracy ? value(r) > value(*best) : value(r) < value(*best))) best = &r;
  }
  return best;
}

bool run_queue(const Experiment& experiment, const QueueOptions& options, const std::function<bool()>& interrupted) {
  return Queue(experiment, options, interrupted).run();
}

}  // namespace lla::trained
