#include "common/records.hpp"

#include <algorithm>
#include <vector>

#include <fmt/core.h>

namespace lla::experiments {
namespace {

enum class Kind { text, boolean, whole, number, number_or_null, numbers, series, curve };

struct Field {
  const char* name;
  Kind kind;
};

bool is_trained(const std::string& task) {
  return task == "in-context" || task == "recall" || task == "state-tracking" || task == "language-model";
}

// The task itself or one of its studies.
bool is_regression(const std::string& task) { return task == "regression" || task.rfind("regression-", 0) == 0; }

const std::vector<Field>& fields_of(const std::string& task) {
  static const std::vector<Field> regression = {{"d", Kind::whole},         {"segment", Kind::whole},
                                                {"strict", Kind::boolean},  {"model", Kind::text},
                                                {"ridge", Kind::number},    {"scale", Kind::number},
                                                {"noise", Kind::number},    {"kernel", Kind::text},
                                                {"qk_norm", Kind::boolean}, {"query_noise", Kind::number_or_null},
                                                {"sequences", Kind::whole}, {"mse", Kind::curve},
                                                {"mse_mean", Kind::number}};
  static const std::vector<Field> rates = {{"d", Kind::whole},        {"n", Kind::whole},
                                           {"estimator", Kind::text}, {"bandwidth", Kind::number_or_null},
                                           {"ise", Kind::numbers},    {"ise_mean", Kind::number}};
  static const std::vector<Field> memory = {
      {"n", Kind::whole},      {"method", Kind::text}, {"dtype", Kind::text},
      {"d", Kind::whole},      {"batch", Kind::whole}, {"peak_bytes", Kind::number_or_null},
      {"fits", Kind::boolean}, {"ran", Kind::boolean}, {"seconds", Kind::number_or_null}};
  static const std::vector<Field> solver = {{"kind", Kind::text},         {"position", Kind::whole},
                                            {"ridge", Kind::number},      {"form", Kind::text},
                                            {"arithmetic", Kind::text},   {"tolerance", Kind::number},
                                            {"iterations", Kind::number}, {"error", Kind::number_or_null}};
  static const std::vector<Field> lemmas = {
      {"d", Kind::whole},        {"n", Kind::whole},      {"bandwidth", Kind::number}, {"quantity", Kind::text},
      {"estimator", Kind::text}, {"value", Kind::number}, {"values", Kind::numbers}};
  static const std::vector<Field> capacity = {
      {"d", Kind::whole},        {"normalised", Kind::boolean}, {"pairs", Kind::whole},
      {"linear", Kind::number},  {"linear_bias", Kind::number}, {"linear_interference", Kind::number},
      {"softmax", Kind::number}, {"mesanet", Kind::number},     {"lla", Kind::number}};
  static const std::vector<Field> interpolation = {{"kind", Kind::text},
                                                   {"name", Kind::text},
                                                   {"rms_error", Kind::number_or_null},
                                                   {"x", Kind::numbers},
                                                   {"y", Kind::numbers}};
  static const std::vector<Field> iterations = {{"kind", Kind::text},     {"d", Kind::whole},
                                                {"method", Kind::text},   {"ridge", Kind::number_or_null},
                                                {"worst", Kind::numbers}, {"median", Kind::numbers}};
  static const std::vector<Field> trained = {{"model", Kind::text},
                                             {"learning_rate", Kind::number},
                                             {"seed", Kind::whole},
                                             {"steps", Kind::whole},
                                             {"steps_planned", Kind::whole},
                                             {"seconds", Kind::number},
                                             {"ended", Kind::text},
                                             {"flattened", Kind::boolean},
                                             {"parameters", Kind::whole},
                                             {"loss", Kind::series},
                                             {"validation", Kind::series},
                                             {"test", Kind::series},
                                             {"validation_best", Kind::number_or_null}};
  static const std::vector<Field> unknown;
  return is_regression(task)       ? regression
         : is_trained(task)        ? trained
         : task == "rates"         ? rates
         : task == "lemmas"        ? lemmas
         : task == "memory"        ? memory
         : task == "solver"        ? solver
         : task == "iterations"    ? iterations
         : task == "capacity"      ? capacity
         : task == "interpolation" ? interpolation
                                   : unknown;
}

// Empty when the value is of its kind, otherwise what it should be.
std::string wrong(const Json& value, Kind kind, int64_t length) {
  const auto numbers = [&] {
    return value.is_array() && std::all_of(value.begin(), value.end(), [](const Json& x) { return x.is_number(); });
  };
  switch (kind) {
    case Kind::text: return value.is_string() ? "" : "text";
    case Kind::boolean: return value.is_boolean() ? "" : "true or false";
    case Kind::whole: return value.is_number_integer() ? "" : "a whole number";
    case Kind::number: return value.is_number() ? "" : "a number";
    case Kind::number_or_null: return value.is_number() || value.is_null() ? "" : "a number or null";
    case Kind::numbers: return numbers() && !value.empty() ? "" : "a list of numbers";
    case Kind::series: return numbers() ? "" : "a list of numbers, which may be empty";
    case Kind::curve:
      return numbers() && static_cast<int64_t>(value.size()) == length ? ""
                                                                       : fmt::format("a list of {} numbers", length);
  }
  return "";
}

std::string shortened(const Json& value) {
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= 40 ? text : text.substr(0, 40) + "...";
}

}  // namespace

void check_results_file(const fs::path& path, const Json& file) {
  if (!file.is_object()) throw Failure(fmt::format("{} is not a results file of this program", path.string()));
  for (const char* name : {"schema_version", "task", "settings", "machine", "command", "records"}) {
    if (!file.contains(name)) {
      throw Failure(fmt::format("{} is not a results file of this program: it has no \"{}\"", path.string(), name));
    }
  }
  if (file["schema_version"] != kSchemaVersion) {
    throw Failure(fmt::format("{} has schema version {}, this program reads version {}; choose another directory",
                              path.string(), shortened(file["schema_version"]), kSchemaVersion));
  }
  const auto damaged = [&](const std::string& where, const Json& found, const std::string& wanted) {
    return Failure(fmt::format("{} is damaged: {} is {}, not {}; move it away or choose another directory",
                               path.string(), where, shortened(found), wanted));
  };
  const auto require = [&](const char* name, bool good, const char* wanted) {
    if (!good) throw damaged(fmt::format("\"{}\"", name), file[name], wanted);
  };
  require("task", file["task"].is_string(), "text");
  require("settings", file["settings"].is_object(), "an object");
  require("machine", file["machine"].is_object(), "an object");
  require("command", file["command"].is_string(), "text");
  require("records", file["records"].is_array(), "a list");
  if (file.contains("summary")) require("summary", file["summary"].is_object(), "an object");

  const std::string task = file["task"];
  const Json& settings = file["settings"];
  const Json& records = file["records"];
  const bool has_curves = is_regression(task) && !records.empty();
  if (has_curves && !(settings.contains("length") && settings["length"].is_number_integer())) {
    throw damaged("\"settings\"", settings, "settings with a \"length\"");
  }
  const int64_t length = has_curves ? settings["length"].get<int64_t>() : 0;
  for (size_t i = 0; i < records.size(); ++i) {
    const Json& record = records[i];
    if (!record.is_object()) throw damaged(fmt::format("record {}", i + 1), record, "an object");
    for (const Field& field : fields_of(task)) {
      if (!record.contains(field.name)) {
        throw Failure(fmt::format("{} is damaged: record {} has no \"{}\"; move it away or choose another directory",
                                  path.string(), i + 1, field.name));
      }
      if (const std::string wanted = wrong(record[field.name], field.kind, length); !wanted.empty()) {
        throw damaged(fmt::format("\"{}\" of record {}", field.name, i + 1), record[field.name], wanted);
      }
    }
  }
}

}  // namespace lla::experiments
