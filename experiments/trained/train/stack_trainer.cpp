#include "train/stack_trainer.hpp"

#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>

#include <fmt/core.h>

#include "train/checkpoint.hpp"

namespace lla::trained {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

constexpr const char* kStatuses[SolveCounts::statuses] = {"ok",  "max_iterations", "breakdown",
                                                          "nan", "precision",      "invalid"};

at::ScalarType compute_type(const std::string& precision, const at::Device& device) {
  if (precision == "bf16") return at::kBFloat16;
  return precision == "auto" && device.is_cuda() ? at::kBFloat16 : at::kFloat;
}

Json to_json(const RunState& r) {
  return {{"learning_rate", r.run.learning_rate},
          {"seed", r.run.seed},
          {"ended", r.ended},
          {"steps", r.steps},
          {"seconds", r.seconds},
          {"epochs", r.epochs},
          {"rows", r.rows},
          {"extra", r.extra}};
}

RunState run_from(const Json& j) {
  return {{j["learning_rate"], j["seed"]}, j["ended"], j["steps"], j["seconds"], j["epochs"], j["rows"], j["extra"]};
}

}  // namespace

StackTrainer::StackTrainer(const Stack& stack, const ModelConfig& config, Sources sources, TrainerOptions options)
    : stack_(stack),
      model_(config),
      sources_(std::move(sources)),
      options_(std::move(options)),
      compute_(compute_type(stack.training.precision, options_.device)),
      steps_per_epoch_(steps_of(stack.training) / stack.training.epochs) {
  for (const Run& run : stack.runs) runs_.emplace_back().run = run;
  for (size_t i = 0; i < runs_.size(); ++i) active_.push_back(i);
  if (!load()) {
    std::vector<at::Tensor> start;
    for (const RunState& r : runs_) start.push_back(model_.init(r.run.seed));
    const Training& t = stack_.training;
    std::vector<double> rates;
    for (const RunState& r : runs_) rates.push_back(r.run.learning_rate);
    adam_ = std::make_unique<AdamW>(at::stack(start).to(options_.device), model_.parameters().decay_mask(), rates,
                                    schedule(t.schedule, steps_of(t), t.warmup, t.final_rate),
                                    AdamWOptions{t.beta1, t.beta2, t.epsilon, t.weight_decay, t.clip});
  }
}

std::vector<uint64_t> StackTrainer::seeds() const {
  std::vector<uint64_t> out;
  for (const size_t i : active_) out.push_back(runs_[i].run.seed);
  return out;
}

void StackTrainer::step() {
  const Labelled labelled = sources_.training->take(order_.index_select(0, position_).squeeze(0));
  const StackedParameters weights(model_.parameters(), adam_->master, compute_, true);
  SolveCounts counts;
  const at::Tensor loss = losses(model_, weights, labelled, &counts);
  weights.gradients(loss.sum(), gradient_);
  const at::NoGradGuard no_grad;
  adam_->step(gradient_);
  loss_sum_.add_(loss.detach());
  counts_.add_(counts.count(weights.runs(), options_.device));
  position_.add_(1);
}

void StackTrainer::arrange() {
  const auto runs = static_cast<int64_t>(active_.size());
  const auto whole = at::TensorOptions(options_.device).dtype(at::kLong);
  replay_.reset();
  gradient_ = at::zeros_like(adam_->master);
  order_ = at::zeros({steps_per_epoch_, runs, stack_.training.batch}, whole);
  position_ = at::zeros({1}, whole);
  if (!loss_sum_.defined() || loss_sum_.size(0) != runs) {
    loss_sum_ = at::zeros({runs}, whole.dtype(at::kFloat));
    counts_ = at::zeros({2, runs, SolveCounts::statuses}, whole);
  }
  order_.copy_(sources_.training->order(seeds(), epoch_, steps_per_epoch_, stack_.training.batch));
  position_.fill_(done_);
  const std::vector<at::Tensor> state = {adam_->master, adam_->first, adam_->second, adam_->steps,
                                         loss_sum_,     counts_,      position_};
  std::vector<at::Tensor> kept;
  if (options_.device.is_cuda() && options_.captured) {
    for (const at::Tensor& t : state) kept.push_back(t.clone());
    // The warm-up takes the first batches and rates, wherever the run stands: near its end there are no others left.
    position_.fill_(0);
    adam_->steps.zero_();
  }
  replay_ = make_replay(
      options_.device, options_.captured, [this] { step(); },
      [&] {
        for (size_t i = 0; i < state.size(); ++i) state[i].copy_(kept[i]);
      });
}

void StackTrainer::begin_epoch() {
  order_.copy_(sources_.training->order(seeds(), epoch_, steps_per_epoch_, stack_.training.batch));
  position_.zero_();
  loss_sum_.zero_();
  done_ = 0;
}

Glance StackTrainer::glance() const {
  Glance g{epoch_, stack_.training.epochs, done_, steps_per_epoch_, active_.size(), 0, -1, 0, 0};
  g.loss = std::numeric_limits<double>::infinity();
  if (done_ > 0 && !active_.empty()) g.loss = loss_sum_.min().item<double>() / double(done_);
  for (const RunState& r : runs_) {
    if (r.epochs.empty()) continue;
    const double score = r.epochs.back()["validation"];
    if (g.score < 0 || (sources_.accuracy ? score > g.score : score < g.score)) g.score = score;
    if (active_.empty()) g.loss = std::min(g.loss, r.epochs.back()["loss"].get<double>());
  }
  g.steps_per_second = step_seconds_ > 0 ? 1 / step_seconds_ : 0;
  g.seconds_left = active_.empty() ? 0 : step_seconds_ * double((g.epochs - epoch_) * steps_per_epoch_ - done_);
  return g;
}

bool StackTrainer::train(const std::function<bool()>& stop, const std::function<void(const Glance&)>& look) {
  const DeviceScope scope(options_.device);
  if (active_.empty()) return true;
  arrange();
  const bool asynchronous = options_.device.is_cuda();
  const int64_t between_looks = asynchronous ? 64 : 4;
  auto last_save = Clock::now();
  while (!active_.empty()) {
    while (done_ < steps_per_epoch_) {
      const auto start = Clock::now();
      const int64_t n = std::min(between_looks, steps_per_epoch_ - done_);
      for (int64_t i = 0; i < n; ++i) (*replay_)();
      synchronize(options_.device);
      const double took = seconds_since(start);
      step_seconds_ = took / double(n);
      done_ += n;
      for (const size_t i : active_) {
        runs_[i].seconds += took / double(active_.size());
        runs_[i].steps += n;
      }
      if (done_ < steps_per_epoch_) look(glance());
      if (stop()) return save(), false;
      if (seconds_since(last_save) > options_.checkpoint_seconds) save(), last_save = Clock::now();
    }
    const size_t before = active_.size();
    end_epoch();
    Glance g = glance();
    g.step = steps_per_epoch_,
    g.seconds_left = active_.empty() ? 0 : step_seconds_ * double((g.epochs - epoch_) * g.steps);
    look(g);
    if (active_.empty()) break;
    if (active_.size() != before)
      arrange(), save(), last_save = Clock::now();
    else
      begin_epoch();
  }
  return true;
}

void StackTrainer::evaluate(const Source& source, int64_t count, std::vector<double>& loss,
                            std::vector<double>& score) const {
  const at::NoGradGuard no_grad;
  const auto runs = static_cast<int64_t>(active_.size());
  const StackedParameters weights(model_.parameters(), adam_->master, compute_, false);
  const auto real = at::TensorOptions(options_.device).dtype(at::kDouble);
  at::Tensor loss_sum = at::zeros({runs}, real), hit_sum = at::zeros({runs}, real);
  int64_t labels = 0;
  count = std::min(count, source.count());
  for (int64_t first = 0; first < count; first += stack_.training.evaluation_batch) {
    const int64_t last = std::min(count, first + stack_.training.evaluation_batch);
    const Labelled labelled = source.take(source.rows(seeds(), first, last).to(options_.device));
    const at::Tensor out = outputs(model_, weights, labelled);
    loss_sum += losses(out, labelled).to(at::kDouble) * double(last - first);
    if (sources_.accuracy) {
      hit_sum += hits(out, labelled);
      labels += labelled.labels[0].numel();
    }
  }
  const at::Tensor mean = (loss_sum / double(count)).to(at::kCPU), share = (hit_sum / double(labels)).to(at::kCPU);
  for (int64_t r = 0; r < runs; ++r) {
    loss.push_back(mean.data_ptr<double>()[r]);
    score.push_back((sources_.accuracy ? share : mean).data_ptr<double>()[r]);
  }
}

void StackTrainer::end_epoch() {
  std::vector<double> loss[2], score[2];
  evaluate(*sources_.validation, stack_.training.validation, loss[0], score[0]);
  if (sources_.test) evaluate(*sources_.test, stack_.training.test, loss[1], score[1]);
  const at::Tensor sums = loss_sum_.to(at::kCPU), counts = counts_.to(at::kCPU);
  ++epoch_;
  std::vector<int64_t> stay;
  for (size_t i = 0; i < active_.size(); ++i) {
    RunState& r = runs_[active_[i]];
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t s = 0; s < SolveCounts::statuses; ++s) {
        const auto count = counts[pass][static_cast<int64_t>(i)][s].item<int64_t>();
        if (count > 0) r.rows[pass == 0 ? "forward" : "backward"][kStatuses[s]] = count;
      }
    }
    const double training = sums.data_ptr<float>()[i] / double(steps_per_epoch_);
    const bool finite =
        std::isfinite(training) && std::isfinite(loss[0][i]) && (loss[1].empty() || std::isfinite(loss[1][i]));
    if (finite) {
      Json line = {{"epoch", epoch_}, {"loss", training}, {"validation_loss", loss[0][i]}, {"validation", score[0][i]}};
      if (sources_.test) line["test_loss"] = loss[1][i], line["test"] = score[1][i];
      r.epochs.push_back(line);
    }
    const double enough = stack_.training.leave_at;
    if (!finite)
      r.ended = "not finite";
    else if (epoch_ == stack_.training.epochs)
      r.ended = "cap";
    else if (sources_.accuracy && enough > 0 && score[0][i] >= enough)
      r.ended = "accuracy";
    else
      stay.push_back(static_cast<int64_t>(i));
    if (options_.at_end && (r.ended == "cap" || r.ended == "accuracy")) {
      r.extra = options_.at_end(model_, adam_->master.narrow(0, static_cast<int64_t>(i), 1), compute_);
    }
    log(r);
  }
  if (stay.size() == active_.size()) return;
  std::vector<size_t> left;
  for (const int64_t i : stay) left.push_back(active_[i]);
  done_ = 0;
  if (left.empty()) {
    active_.clear();
    return;
  }
  active_ = left;
  adam_->keep(stay);
  counts_ = counts_.index_select(1, at::tensor(stay, at::kLong).to(options_.device)).clone();
  loss_sum_ = at::zeros({static_cast<int64_t>(stay.size())}, loss_sum_.options());
}

void StackTrainer::log(const RunState& run) const {
  experiments::fs::create_directories(options_.folder / "logs");
  std::ofstream file(options_.folder / "logs" /
                     fmt::format("{}-lr{:g}-seed{}.jsonl", stack_.name(), run.run.learning_rate, run.run.seed));
  for (const Json& line : run.epochs) file << line.dump() << "\n";
  if (!run.ended.empty()) {
    file << Json{{"ended", run.ended}, {"steps", run.steps}, {"seconds", run.seconds}, {"rows", run.rows}}.dump()
         << "\n";
  }
}

namespace {
experiments::fs::path checkpoint_path(const TrainerOptions& options, const Stack& stack) {
  return options.folder / "partial" / (stack.name() + ".checkpoint");
}
}  // namespace

void StackTrainer::save() const {
  Checkpoint c;
  c.state = {
      {"stack", stack_.name()}, {"epoch", epoch_}, {"done", done_}, {"active", active_}, {"runs", Json::array()}};
  for (const RunState& r : runs_) c.state["runs"].push_back(to_json(r));
  c.tensors = {{"master", adam_->master}, {"first", adam_->first}, {"second", adam_->second},
               {"steps", adam_->steps},   {"loss_sum", loss_sum_}, {"counts", counts_}};
  write_checkpoint(checkpoint_path(options_, stack_), c);
}

bool StackTrainer::load() {
  const auto path = checkpoint_path(options_, stack_);
  if (!experiments::fs::exists(path)) return false;
  const Checkpoint c = read_checkpoint(path);
  const Json& runs = c.state["runs"];
  bool same = c.state["stack"] == stack_.name() && runs.size() == runs_.size();
  for (size_t i = 0; same && i < runs_.size(); ++i) {
    same = runs[i]["learning_rate"] == runs_[i].run.learning_rate && runs[i]["seed"] == runs_[i].run.seed;
  }
  if (!same) throw Failure(fmt::format("{} is of other runs; move it away or choose another --out", path.string()));
  for (size_t i = 0; i < runs_.size(); ++i) runs_[i] = run_from(runs[i]);
  active_ = c.state["active"].get<std::vector<size_t>>();
  epoch_ = c.state["epoch"], done_ = c.state["done"];
  const auto put = [&](const char* name) { return c.tensors.at(name).to(options_.device).clone(); };
  const Training& t = stack_.training;
  std::vector<double> rates;
  for (const size_t i : active_) rates.push_back(runs_[i].run.learning_rate);
  adam_ = std::make_unique<AdamW>(put("master"), model_.parameters().decay_mask(), rates,
                                  schedule(t.schedule, steps_of(t), t.warmup, t.final_rate),
                                  AdamWOptions{t.beta1, t.beta2, t.epsilon, t.weight_decay, t.clip});
  adam_->first = put("first"), adam_->second = put("second"), adam_->steps = put("steps");
  loss_sum_ = put("loss_sum"), counts_ = put("counts");
  return true;
}

void StackTrainer::forget_checkpoint() const { experiments::fs::remove(checkpoint_path(options_, stack_)); }

}  // namespace lla::trained
