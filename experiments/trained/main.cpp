// lla_train: the paper's trained experiments and a language model. `lla reproduce in-context` and so on start it.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include <csignal>
#include <thread>

#include <fmt/core.h>

#include <lla/lla.h>

#include "common/results.hpp"
#include "experiment.hpp"
#include "tasks/task.hpp"
#include "text/language.hpp"
#include "train/graph.hpp"
#include "train/queue.hpp"

namespace lla::trained {
namespace {

volatile std::sig_atomic_t stop_requested = 0;
void request_stop(int signal) {
  stop_requested = 1;
  std::signal(signal, SIG_DFL);
}

std::string command_line;  // of this process, for the results

struct Options {
  std::string config, device = "auto", out;
  Subset subset;
  bool quick = false, paper = false, plateau = false, dry_run = false, print_config = false, eager = false;
  double seconds = 0, checkpoint_seconds = 120;
  int threads = 0;
};

std::vector<at::Device> devices(const std::string& text) {
  if (text == "cpu") return {at::Device(at::kCPU)};
  const int count = device_count();
  if (text == "auto" && count == 0) return {at::Device(at::kCPU)};
  if (count == 0) {
    throw Failure("--device " + text +
                  " cannot be used: there is no GPU here, or the program was built without CUDA's "
                  "headers (see docs/experiments.md)");
  }
  std::vector<at::Device> list;
  if (text == "auto" || text == "cuda") {
    for (int i = 0; i < count; ++i) list.emplace_back(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    return list;
  }
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const at::Device device(part);
    if (!device.is_cuda() || device.index() >= count) throw Failure(fmt::format("there is no device {}", part));
    list.push_back(device.has_index() ? device : at::Device(at::kCUDA, 0));
  }
  return list;
}

int64_t tokens_of(const Stack& stack) {
  if (stack.task == "language-model") return language_layout(stack.task_options).length;
  return make_task(stack.task, stack.task_options)->layout().length;
}

// The list of runs with the time they are expected to take.
void list_runs(const Experiment& experiment, const std::string& device) {
  double total = 0;
  bool complete = true;
  fmt::print("{:<64} {:>5} {:>8} {:>10}\n", "stack", "runs", "steps", "seconds");
  for (const Stack& stack : experiment.stacks) {
    const auto seconds = estimated_seconds(experiment.estimates, stack, device, tokens_of(stack));
    total += seconds.value_or(0);
    complete = complete && seconds;
    fmt::print("{:<64} {:>5} {:>8} {:>10}\n", stack.name(), stack.most_runs(), steps_of(stack.training),
               seconds ? fmt::format("{:.0f}", *seconds) : "unknown");
  }
  fmt::print("\n{} stacks; {}about {:.0f} s on one {} device, from step times measured before\n",
             experiment.stacks.size(), complete ? "" : "of those with an estimate ", total, device);
}

int run(const std::string& task, Options o) {
  o.subset.variant = o.quick ? "quick" : o.paper ? "paper" : o.plateau ? "plateau" : "";
  Json config = o.config.empty() ? builtin_config(task) : experiments::read_json(o.config);
  if (!config.is_object() || !config.contains("task") || config["task"] != task) {
    throw Failure(fmt::format("{} is not a config of \"{}\"", o.config, task));
  }
  const Experiment experiment = make_experiment(config, o.subset);
  if (o.print_config) return fmt::print("{}\n", experiment.config.dump(2)), 0;
  if (o.dry_run) {  // for a GPU that is elsewhere too
    const bool gpu = o.device == "auto" ? device_count() > 0 : o.device != "cpu";
    return list_runs(experiment, gpu ? "cuda" : "cpu"), 0;
  }
  require_determinism();
  const std::vector<at::Device> on = devices(o.device);
  if (task == "language-model") {
    load_corpus(experiment.config.contains("corpus") ? experiment.config["corpus"] : Json::object());
  }
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  QueueOptions q;
  q.devices = on;
  q.out = o.out.empty() ? "out/" + task + (o.plateau ? "-plateau" : "") : o.out;
  q.seconds = o.seconds;
  q.threads = o.threads > 0 ? o.threads : static_cast<int>(std::thread::hardware_concurrency());
  q.captured = !o.eager;
  q.checkpoint_seconds = o.checkpoint_seconds;
  q.command = command_line;
  if (on[0].is_cpu()) {
    // Stacks side by side on a thread each: their products are too small to be shared by several.
    q.devices.assign(static_cast<size_t>(q.threads), on[0]);
    at::set_num_threads(1);
    lla_set_num_threads(1);
  }
  if (!run_queue(experiment, q, [] { return stop_requested != 0; })) {
    fmt::print(stderr, "Stopped. What is done is in {}; the same command continues from there.\n", q.out.string());
    return 3;
  }
  const std::string out = q.out.string();
  fmt::print("\nResults: {}/results.json\nThe page with the figures: lla report {}\n", out,
             experiments::shell_words({&out, 1}));
  return 0;
}

void add_experiment(CLI::App& app, const std::string& task, const std::string& about, int& exit_code) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand(task, about);
  c->add_option("--config", o->config, "Another config file than the one built in")->check(CLI::ExistingFile);
  auto* quick = c->add_flag("--quick", o->quick, "Minutes on two cores: small sizes, all models");
  auto* paper = c->add_flag("--paper", o->paper, "Everything the paper has, at its size")->excludes(quick);
  if (task == "recall") {
    c->add_flag("--plateau", o->plateau, "One setting with 20, 40 and 60 thousand examples: when accuracy jumps")
        ->excludes(quick)
        ->excludes(paper);
  }
  c->add_option("--model", o->subset.models, "Only this model; repeatable");
  c->add_option("--learning-rate", o->subset.learning_rates, "Only this one; repeatable");
  c->add_option("--seed", o->subset.seeds, "Only this one; repeatable");
  c->add_option("--length", o->subset.lengths, "Only settings of this length; repeatable");
  if (task == "in-context") c->add_option("--segment", o->subset.segments, "Only settings of this segment; repeatable");
  if (task == "recall") c->add_option("--pairs", o->subset.pairs, "Only settings of as many pairs; repeatable");
  if (task == "state-tracking") c->add_option("--items", o->subset.items, "Only settings of as many; repeatable");
  c->add_option("--examples", o->subset.examples, "Only settings with as many training examples; repeatable");
  c->add_option("--epochs", o->subset.epochs, "At most; the schedule ends there")->check(CLI::Range(1, 1 << 20));
  c->add_option("--set", o->subset.assignments, "A value of the config, as training.warmup=0; repeatable");
  c->add_option("--device", o->device, "cpu, cuda (all GPUs), or a list as cuda:0,cuda:1")->capture_default_str();
  c->add_option("--out", o->out,
                "Folder of the results; a run that was stopped continues there (default out/" + task + ")");
  c->add_option("--seconds", o->seconds, "Stop after as many; the same command goes on from there");
  c->add_option("--checkpoint-seconds", o->checkpoint_seconds, "Between two checkpoints")->capture_default_str();
  c->add_option("--threads", o->threads,
                "That make data, and on the CPU stacks trained side by side; default all cores");
  c->add_flag("--eager", o->eager, "No CUDA graph");
  c->add_flag("--dry-run", o->dry_run, "The list of runs and the time they are expected to take");
  c->add_flag("--print-config", o->print_config, "The config as it would be used");
  c->callback([o, task, &exit_code] { exit_code = run(task, *o); });
}

void add_corpus(CLI::App& app, int& exit_code) {
  CLI::App* c = app.add_subcommand("corpus", "The language model's text: writes its parts, prints its manifest");
  auto out = std::make_shared<std::string>();
  c->add_option("--out", *out, "Folder for training.bin, validation.bin and test.bin");
  c->callback([out, &exit_code] {
    const Corpus corpus = read_corpus(corpus_options(Json::object()));
    if (!out->empty()) {
      experiments::fs::create_directories(*out);
      const auto write = [&](const char* name, const std::vector<uint8_t>& bytes) {
        experiments::write_atomically(experiments::fs::path(*out) / name,
                                      {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      };
      write("training.bin", corpus.training), write("validation.bin", corpus.validation),
          write("test.bin", corpus.test);
    }
    fmt::print("{}\n", corpus.manifest.dump(2));
    exit_code = 0;
  });
}

}  // namespace
}  // namespace lla::trained

int main(int argc, char** argv) {
  using namespace lla::trained;
  CLI::App app{"Trained experiments with Local Linear Attention", "lla_train"};
  app.require_subcommand(1);
  int exit_code = 0;
  add_experiment(app, "in-context", "In-context regression on piecewise linear data", exit_code);
  add_experiment(app, "recall", "Multi-query associative recall", exit_code);
  add_experiment(app, "state-tracking", "Permutation state tracking", exit_code);
  add_experiment(app, "language-model", "A byte-level language model on Python source", exit_code);
  add_corpus(app, exit_code);
  std::vector<std::string> words = {"lla", "reproduce"};
  words.insert(words.end(), argv + 1, argv + argc);
  command_line = lla::experiments::shell_words(words);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const Failure& error) {
    fmt::print(stderr, "lla_train: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "lla_train: {}\n", error.what());
    return 1;
  }
  return exit_code;
}
