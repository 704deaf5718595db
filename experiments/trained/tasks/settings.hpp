// Reads the settings of a task or a model from JSON. A setting nobody asked for is refused: nothing is accepted and
// ignored.
#pragma once

#include <set>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "common/results.hpp"

namespace lla::trained {

class Settings {
 public:
  // `what` names the object in messages.
  Settings(experiments::Json values, std::string what) : values_(std::move(values)), what_(std::move(what)) {
    if (!values_.is_object()) throw experiments::Failure(fmt::format("{} is {}, not an object", what_, values_.dump()));
  }

  bool has(const std::string& name) const { return values_.contains(name); }
  int64_t whole(const std::string& name, int64_t fallback, int64_t least, int64_t most) {
    return checked(
        name, fallback, least, most, [](const auto& v) { return v.is_number_integer(); }, "a whole number");
  }
  double number(const std::string& name, double fallback, double least, double most) {
    return checked(
        name, fallback, least, most, [](const auto& v) { return v.is_number(); }, "a number");
  }
  bool boolean(const std::string& name, bool fallback) {
    asked_.insert(name);
    if (!has(name)) return fallback;
    if (!values_[name].is_boolean()) refuse(name, "true or false");
    return values_[name].template get<bool>();
  }
  std::string choice(const std::string& name, const std::string& fallback, const std::vector<std::string>& allowed) {
    asked_.insert(name);
    const std::string value = has(name) && values_[name].is_string() ? values_[name].get<std::string>() : fallback;
    std::string list;
    for (const auto& one : allowed) {
      if (one == value && (!has(name) || values_[name].is_string())) return value;
      list += (list.empty() ? "" : ", ") + one;
    }
    refuse(name, "one of " + list);
  }
  const experiments::Json& object(const std::string& name) {
    static const experiments::Json empty = experiments::Json::object();
    asked_.insert(name);
    if (!has(name)) return empty;
    if (!values_[name].is_object()) refuse(name, "an object");
    return values_[name];
  }
  template <class T>
  std::vector<T> list(const std::string& name, std::vector<T> fallback) {
    asked_.insert(name);
    if (!has(name)) return fallback;
    try {
      if (values_[name].is_array() && !values_[name].empty()) return values_[name].get<std::vector<T>>();
    } catch (const experiments::Json::exception&) {
    }
    refuse(name, "a list that is not empty");
  }
  // After everything was asked for.
  void finish() const {
    for (const auto& [name, value] : values_.items()) {
      if (asked_.count(name) == 0) throw experiments::Failure(fmt::format("{} has no setting \"{}\"", what_, name));
    }
  }
  [[noreturn]] void refuse(const std::string& name, const std::string& wanted) const {
    throw experiments::Failure(
        fmt::format("\"{}\" of {} is {}, not {}", name, what_, has(name) ? values_[name].dump() : "missing", wanted));
  }

 private:
  template <class T, class Is>
  T checked(const std::string& name, T fallback, T least, T most, Is is, const char* kind) {
    asked_.insert(name);
    const T value = has(name) && is(values_[name]) ? values_[name].template get<T>() : fallback;
    if ((has(name) && !is(values_[name])) || !(value >= least && value <= most)) {
      refuse(name, fmt::format("{} from {} to {}", kind, least, most));
    }
    return value;
  }

  experiments::Json values_;
  std::string what_;
  std::set<std::string> asked_;
};

}  // namespace lla::trained
