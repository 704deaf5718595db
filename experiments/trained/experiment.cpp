#include "experiment.hpp"

#include <algorithm>
#include <cmath>

#include "tasks/settings.hpp"

namespace lla::trained {
namespace {

Json merged(Json base, const Json& patch) {
  base.merge_patch(patch);
  return base;
}

// "training.warmup=0" sets config["training"]["warmup"]; the value is JSON, or text where it is not.
void assign(Json& config, const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) throw Failure(fmt::format("--set {}: write NAME=VALUE", text));
  std::string path = "/" + text.substr(0, equals);
  std::replace(path.begin(), path.end(), '.', '/');
  Json value = Json::parse(text.substr(equals + 1), nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) value = text.substr(equals + 1);
  try {
    config[Json::json_pointer(path)] = value;
  } catch (const Json::exception&) {
    throw Failure(fmt::format("--set {}: the config has no such place", text));
  }
}

template <class T>
bool wanted(const Json& setting, const char* name, const std::vector<T>& values) {
  return values.empty() ||
         (setting.contains(name) && std::find(values.begin(), values.end(), setting[name].get<T>()) != values.end());
}

}  // namespace

Training read_training(const Json& values) {
  Settings s(values, "training");
  Training t;
  constexpr int64_t kMost = int64_t{1} << 40;
  t.epochs = s.whole("epochs", t.epochs, 1, 1 << 20);
  t.batch = s.whole("batch", t.batch, 1, 1 << 20);
  t.examples = s.whole("examples", t.examples, 0, kMost);
  t.steps_per_epoch = s.whole("steps_per_epoch", t.steps_per_epoch, 0, kMost);
  t.validation = s.whole("validation", t.validation, 1, 1 << 24);
  t.test = s.whole("test", t.test, 1, 1 << 24);
  t.evaluation_batch = s.whole("evaluation_batch", t.evaluation_batch, 1, 1 << 20);
  t.learning_rates = s.list<double>("learning_rates", {1e-3});
  t.seeds = s.list<uint64_t>("seeds", t.seeds);
  t.seeds_at_best = s.choice("further_seeds", "best", {"best", "all"}) == "best";
  t.beyond_edge = s.boolean("beyond_edge", t.beyond_edge);
  t.schedule = s.choice("schedule", t.schedule, {"cosine", "constant"});
  t.warmup = s.whole("warmup", t.warmup, 0, kMost);
  t.final_rate = s.number("final_rate", t.final_rate, 0, 1);
  t.beta1 = s.number("beta1", t.beta1, 0, 1);
  t.beta2 = s.number("beta2", t.beta2, 0, 1);
  t.epsilon = s.number("epsilon", t.epsilon, 0, 1);
  t.weight_decay = s.number("weight_decay", t.weight_decay, 0, 100);
  t.clip = s.number("clip", t.clip, 0, 1e9);
  t.leave_at = s.number("leave_at", t.leave_at, 0, 1);
  t.precision = s.choice("precision", t.precision, {"auto", "bf16", "f32"});
  s.finish();
  for (const double rate : t.learning_rates) {
    if (!(rate > 0 && std::isfinite(rate))) s.refuse("learning_rates", "a list of numbers above 0");
  }
  if (t.steps_per_epoch == 0 && t.examples < t.batch) {
    s.refuse("examples", fmt::format("at least a batch of {}", t.batch));
  }
  return t;
}

std::string Stack::name() const {
  std::string text = task;
  for (const auto& [key, value] : setting.items()) {
    text += "-" + key + (value.is_string() ? value.get<std::string>() : value.dump());
  }
  if (training.examples > 0) text += fmt::format("-examples{}", training.examples);
  text += "-" + model;
  if (runs_from == RunsFrom::edge) text += "-beyond-edge";
  if (runs_from == RunsFrom::best) text += "-further-seeds";
  return text;
}

size_t Stack::most_runs() const {
  switch (runs_from) {
    case RunsFrom::config: return runs.size();
    case RunsFrom::edge: return 1;
    case RunsFrom::best: return training.seeds.size() - 1;
    case RunsFrom::best_of_other: return training.seeds.size();
  }
  return 0;
}

Json Stack::identity() const {
  Json id = {{"task", task}, {"model", model}};
  id.update(setting);
  id["examples"] = training.examples;
  return id;
}

std::optional<double> rate_beyond_edge(std::vector<double> rates, double best) {
  std::sort(rates.begin(), rates.end());
  const size_t n = rates.size();
  if (n < 2) return {};
  if (best == rates[0]) return best * (best / rates[1]);
  if (best == rates[n - 1]) return best * (best / rates[n - 2]);
  return {};
}

bool scored_by_accuracy(const std::string& task) { return task == "recall" || task == "state-tracking"; }

int64_t steps_of(const Training& t) {
  return t.epochs * (t.steps_per_epoch > 0 ? t.steps_per_epoch : t.examples / t.batch);
}

Experiment make_experiment(Json config, const Subset& subset) {
  for (const char* variant : {"quick", "paper", "plateau"}) {
    const Json patch = config.contains(variant) ? config[variant] : Json();
    config.erase(variant);
    if (subset.variant != variant) continue;
    if (!patch.is_object()) throw Failure(fmt::format("this config has no \"{}\"", variant));
    config.merge_patch(patch);
  }
  for (const std::string& text : subset.assignments) assign(config, text);
  if (!subset.models.empty()) config["models"] = subset.models;
  if (!subset.learning_rates.empty()) {  // only these, not one beyond them
    config["training"]["learning_rates"] = subset.learning_rates;
    config["training"]["beyond_edge"] = false;
  }
  if (!subset.seeds.empty()) config["training"]["seeds"] = subset.seeds;
  if (subset.epochs > 0) config["training"]["epochs"] = subset.epochs;
  Experiment out;
  Settings s(config, "the config");
  const auto models = s.list<std::string>("models", {});
  const auto settings = s.list<Json>("settings", {Json::object()});
  const Json &options = s.object("options"), &model = s.object("model"), &training = s.object("training"),
             &per_model = s.object("per_model");
  out.estimates = s.object("estimates");
  s.object("corpus"), s.object("evaluation");
  const std::string task = s.choice("task", "", {"in-context", "recall", "state-tracking", "language-model"});
  s.finish();
  if (models.empty()) s.refuse("models", "a list of models");
  Json kept = Json::array();
  for (const Json& written : settings) {
    // A setting: options of the task, and patches over what the config says for all settings.
    Json setting = written, patches = Json::object();
    for (const char* name : {"training", "model", "per_model", "models", "rates_of"}) {
      if (written.contains(name)) patches[name] = written[name];
      setting.erase(name);
    }
    Settings own_settings(patches, "a setting");
    Json own = own_settings.object("training");
    const Json own_model = own_settings.object("model"),
               own_per_model = merged(per_model, own_settings.object("per_model"));
    const Json& rates_of = own_settings.object("rates_of");
    // A setting with models of its own keeps to them: of those asked for, the ones it has.
    auto own_models = own_settings.list<std::string>("models", models);
    std::erase_if(own_models, [&](const std::string& name) {
      return !subset.models.empty() && std::find(models.begin(), models.end(), name) == models.end();
    });
    if (own_models.empty()) continue;
    if (!wanted(setting, "length", subset.lengths) || !wanted(setting, "segment", subset.segments) ||
        !wanted(setting, "pairs", subset.pairs) || !wanted(setting, "items", subset.items) ||
        !wanted(own, "examples", subset.examples)) {
      continue;
    }
    if (!own.empty()) patches["training"] = own;
    kept.push_back(merged(setting, patches));
    std::vector<Stack> edges, further;
    for (const std::string& name : own_models) {
      Settings ours(own_per_model.contains(name) ? own_per_model[name] : Json::object(), "per_model's " + name);
      Stack stack;
      stack.task = task, stack.model = name, stack.setting = setting;
      stack.task_options = merged(options, setting);
      stack.model_options = merged(merged(model, own_model), ours.object("model"));
      Json values = merged(merged(training, own), ours.object("training"));
      if (subset.epochs > 0) values["epochs"] = subset.epochs;
      ours.finish();
      stack.training = read_training(values);
      const Training& t = stack.training;
      const auto follows = [&](RunsFrom from, std::vector<Stack>& where) {
        Stack later = stack;
        later.runs.clear(), later.runs_from = from, later.rates_of = merged(stack.identity(), rates_of);
        where.push_back(later);
      };
      if (!rates_of.empty()) {
        follows(RunsFrom::best_of_other, out.stacks);
        continue;
      }
      const bool apart = t.seeds_at_best && t.seeds.size() > 1 && t.learning_rates.size() > 1;
      for (size_t i = 0; i < (apart ? 1 : t.seeds.size()); ++i) {
        for (const double rate : t.learning_rates) stack.runs.push_back({rate, t.seeds[i]});
      }
      out.stacks.push_back(stack);
      if (t.beyond_edge && t.learning_rates.size() > 1) follows(RunsFrom::edge, edges);
      if (apart) follows(RunsFrom::best, further);
    }
    out.stacks.insert(out.stacks.end(), edges.begin(), edges.end());
    out.stacks.insert(out.stacks.end(), further.begin(), further.end());
  }
  config["settings"] = kept;
  if (out.stacks.empty()) throw Failure("no setting of the config is in the subset asked for");
  config.erase("estimates");  // what is expected is no part of what was done
  out.config = config;
  return out;
}

std::optional<double> estimated_seconds(const Json& estimates, const Stack& stack, const std::string& device,
                                        int64_t tokens) {
  const Json::json_pointer place("/" + device + "/" + stack.model);
  if (!estimates.is_object() || !estimates.contains(place)) return {};
  const Training& t = stack.training;
  return estimates[place].get<double>() * double(stack.most_runs()) * double(steps_of(t)) * double(t.batch) *
         double(tokens) / 1e6;
}

}  // namespace lla::trained
