// Multi-query associative recall, after Zoology's generator (HazyResearch/zoology, multiquery_ar): N pairs of a key and
// a value, then every key once more, each at a slot drawn by a power law of its distance from the pairs; the label of a
// query is its value. Slots hold two tokens, the second of which is filler, as is everything else.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tasks/draws.hpp"
#include "tasks/settings.hpp"

namespace lla::trained {
namespace {

enum Purpose : uint64_t { kKeys, kValues, kGaps, kFiller };

class Recall : public Task {
 public:
  explicit Recall(const Json& values) {
    Settings s(values, "recall's task");
    length_ = s.whole("length", 64, 4, 1 << 16);
    pairs_ = s.whole("pairs", length_ / 4, 1, length_ / 4);
    vocabulary_ = s.whole("vocabulary", 8192, 8, 1 << 24);
    many_to_one_ = s.choice("values", "many-to-one", {"many-to-one", "distinct"}) == "many-to-one";
    random_filler_ = s.choice("filler", "random", {"random", "zero"}) == "random";
    const double power = s.number("power_a", 0.01, 1e-6, 1);
    s.finish();
    if (length_ % 2 != 0) s.refuse("length", "even");
    if (vocabulary_ / 2 - 1 < pairs_) s.refuse("vocabulary", fmt::format("large enough for {} keys", pairs_));
    for (int64_t gap = 1; gap <= (length_ - 2 * pairs_) / 2; ++gap) {
      chances_.push_back(std::pow(static_cast<double>(gap), power - 1));
    }
  }

  Layout layout() const override {
    return {.length = length_, .vocabulary = vocabulary_, .labels = pairs_, .tail = length_ - 2 * pairs_};
  }

  void generate(uint64_t seed, Part part, int64_t index, const Example& out) const override {
    const auto from = [&](Purpose purpose) { return Draws(stream(seed, part, index, purpose)); };
    const int64_t first_value = vocabulary_ / 2;
    const auto keys = from(kKeys).distinct(pairs_, 1, first_value);  // 0 is nobody's key, as in Zoology
    std::vector<int32_t> values;
    if (many_to_one_) {
      Draws draw = from(kValues);
      for (int64_t i = 0; i < pairs_; ++i) {
        values.push_back(static_cast<int32_t>(first_value + draw.below(vocabulary_ - first_value)));
      }
    } else {
      values = from(kValues).distinct(pairs_, first_value, vocabulary_);
    }
    Draws filler = from(kFiller);
    for (int64_t i = 0; i < length_; ++i) {
      out.ids[i] = random_filler_ ? static_cast<int32_t>(filler.below(vocabulary_)) : 0;
    }
    const auto slots = draw_slots(from(kGaps));
    for (int64_t i = 0; i < pairs_; ++i) {
      out.ids[2 * i] = keys[i], out.ids[2 * i + 1] = values[i];
      const auto position = static_cast<int32_t>(2 * pairs_ + 2 * slots[i]);
      out.ids[position] = keys[i];
      out.positions[i] = position;
      out.label_ids[i] = values[i];
    }
  }

 private:
  // Slots one after the other without replacement, each with a chance proportional to its weight among those left: the
  // order in which exponential clocks of those rates ring.
  std::vector<int32_t> draw_slots(Draws draw) const {
    std::vector<double> rings(chances_.size());
    for (size_t i = 0; i < rings.size(); ++i) rings[i] = -std::log1p(-draw.unit()) / chances_[i];
    std::vector<int32_t> order(rings.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + pairs_, order.end(),
                      [&](int32_t a, int32_t b) { return rings[a] < rings[b]; });
    order.resize(pairs_);
    return order;
  }

  int64_t length_, pairs_, vocabulary_;
  bool many_to_one_, random_filler_;
  std::vector<double> chances_;
};

}  // namespace

std::unique_ptr<Task> make_recall(const Json& settings) { return std::make_unique<Recall>(settings); }

}  // namespace lla::trained
