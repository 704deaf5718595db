// A task makes examples: example `index` of a part, for a seed, is a function of those three and of nothing else, so
// that every epoch, every model and every continued run sees the same data. Free of torch.
#pragma once

#include <cstdint>
#include <memory>

#include "common/results.hpp"

namespace lla::trained {

using experiments::Failure;
using experiments::Json;

enum class Part : uint64_t { training, validation, test };

// What all examples of a task share. A token is a vector of `features` numbers or, where that is 0, an id below
// `vocabulary`; a label is a vector of `targets` numbers or an id.
struct Layout {
  int64_t length = 0;
  int64_t features = 0;
  int64_t vocabulary = 0;
  int64_t labels = 0;  // an example
  int64_t targets = 0;
  int64_t tail = 0;  // every label is at one of the last `tail` tokens: a last layer need not compute the others
};

// Where an example goes. What a layout does not have is null.
struct Example {
  float* features;     // (length, features)
  int32_t* ids;        // (length)
  int32_t* positions;  // (labels): of the labelled tokens, counted from the first token
  float* targets;      // (labels, targets)
  int32_t* label_ids;  // (labels)
};

class Task {
 public:
  virtual ~Task() = default;
  virtual Layout layout() const = 0;
  virtual void generate(uint64_t seed, Part part, int64_t index, const Example& out) const = 0;
};

// By name ("in-context", "recall", "state-tracking"), with the settings of its file; throws a Failure that names a
// setting which is unknown, missing or out of range.
std::unique_ptr<Task> make_task(const std::string& name, const Json& settings);

std::unique_ptr<Task> make_in_context(const Json& settings);
std::unique_ptr<Task> make_recall(const Json& settings);
std::unique_ptr<Task> make_state_tracking(const Json& settings);

}  // namespace lla::trained
