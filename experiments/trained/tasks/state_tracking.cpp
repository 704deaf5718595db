// Permutation state tracking: items at positions, swaps of two positions, then positions whose item is asked for:
//
//     p1 = a1 , ... pN = aN # i1 j1 , ... iS jS # q1 = o1 , ... qM =
//
// The label of a query stands at its "=". Ids: items, then positions, then the three delimiters and the padding.
#include <algorithm>

#include "tasks/draws.hpp"
#include "tasks/settings.hpp"

namespace lla::trained {
namespace {

enum Purpose : uint64_t { kItems, kSwaps, kQueries };

class StateTracking : public Task {
 public:
  explicit StateTracking(const Json& values) {
    Settings s(values, "state-tracking's task");
    items_ = s.whole("items", 16, 3, 1 << 12);
    alphabet_ = s.whole("alphabet", 8192, 2, 1 << 24);
    queries_ = s.whole("queries", 8, 1, items_);
    // Whole numbers inside the interval from N/6 to N/3.
    least_ = s.whole("least_swaps", (items_ + 5) / 6, 1, 1 << 16);
    most_ = s.whole("most_swaps", items_ / 3, least_, 1 << 16);
    distinct_ = s.boolean("distinct_items", false);
    show_ = s.choice("answers", "shown", {"shown", "hidden"}) == "shown";
    left_ = s.choice("padding", "left", {"left", "right"}) == "left";
    s.finish();
    if (distinct_ && alphabet_ < items_) s.refuse("alphabet", fmt::format("at least {} for distinct items", items_));
  }

  Layout layout() const override {
    const int64_t questions = 4 * queries_ - 2, length = 4 * items_ + 3 * most_ + questions;
    const int64_t spread = left_ ? 0 : 3 * (most_ - least_);
    return {.length = length, .vocabulary = alphabet_ + items_ + 4, .labels = queries_, .tail = questions + spread};
  }

  void generate(uint64_t seed, Part part, int64_t index, const Example& out) const override {
    const auto from = [&](Purpose purpose) { return Draws(stream(seed, part, index, purpose)); };
    const int64_t hash = alphabet_ + items_, equals = hash + 1, comma = hash + 2, pad = hash + 3;
    Draws draw_item = from(kItems), draw_swap = from(kSwaps);
    std::vector<int32_t> state;
    if (distinct_)
      state = draw_item.distinct(items_, 0, alphabet_);
    else
      for (int64_t i = 0; i < items_; ++i) state.push_back(static_cast<int32_t>(draw_item.below(alphabet_)));
    const int64_t swaps = least_ + draw_swap.below(most_ - least_ + 1);

    const int64_t length = layout().length;
    std::fill(out.ids, out.ids + length, static_cast<int32_t>(pad));
    int32_t* at = out.ids + (left_ ? 3 * (most_ - swaps) : 0);
    const auto write = [&](std::initializer_list<int64_t> ids) {
      for (const int64_t id : ids) *at++ = static_cast<int32_t>(id);
    };
    for (int64_t p = 0; p < items_; ++p) write({alphabet_ + p, equals, state[p], p + 1 < items_ ? comma : hash});
    for (int64_t s = 0; s < swaps; ++s) {
      const int64_t i = draw_swap.below(items_), j = draw_swap.below(items_);
      write({alphabet_ + i, alphabet_ + j, s + 1 < swaps ? comma : hash});
      std::swap(state[i], state[j]);
    }
    // Different positions: an answer that is shown says nothing about a later one.
    const auto asked = from(kQueries).distinct(queries_, 0, items_);
    for (int64_t q = 0; q < queries_; ++q) {
      write({alphabet_ + asked[q], equals});
      out.positions[q] = static_cast<int32_t>(at - 1 - out.ids);
      out.label_ids[q] = state[asked[q]];
      if (q + 1 < queries_) write({show_ ? state[asked[q]] : pad, comma});
    }
  }

 private:
  int64_t items_, alphabet_, queries_, least_, most_;
  bool distinct_, show_, left_;
};

}  // namespace

std::unique_ptr<Task> make_state_tracking(const Json& settings) { return std::make_unique<StateTracking>(settings); }

std::unique_ptr<Task> make_task(const std::string& name, const Json& settings) {
  if (name == "in-context") return make_in_context(settings);
  if (name == "recall") return make_recall(settings);
  if (name == "state-tracking") return make_state_tracking(settings);
  throw Failure("there is no task \"" + name + "\"; there are in-context, recall, state-tracking and language-model");
}

}  // namespace lla::trained
