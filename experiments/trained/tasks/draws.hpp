// Whole numbers in the order they are asked for, from one stream of one example.
#pragma once

#include <utility>
#include <vector>

#include "common/random.hpp"
#include "tasks/task.hpp"

namespace lla::trained {

inline experiments::Stream stream(uint64_t seed, Part part, int64_t index, uint64_t purpose) {
  return {seed, static_cast<uint64_t>(part) << 56 | static_cast<uint64_t>(index), purpose};
}

class Draws {
 public:
  explicit Draws(experiments::Stream stream) : stream_(stream) {}

  double unit() { return stream_.uniform(next_++); }  // [0, 1)
  int64_t below(int64_t n) { return static_cast<int64_t>(unit() * static_cast<double>(n)); }

  template <class T>
  void shuffle(std::vector<T>& values) {
    for (int64_t i = static_cast<int64_t>(values.size()) - 1; i > 0; --i) std::swap(values[i], values[below(i + 1)]);
  }
  // `count` different numbers from [first, last), in the order drawn.
  std::vector<int32_t> distinct(int64_t count, int64_t first, int64_t last) {
    std::vector<int32_t> drawn;
    while (static_cast<int64_t>(drawn.size()) < count) {
      const auto value = static_cast<int32_t>(first + below(last - first));
      bool seen = false;
      for (const int32_t other : drawn) seen |= other == value;
      if (!seen) drawn.push_back(value);
    }
    return drawn;
  }

 private:
  experiments::Stream stream_;
  uint64_t next_ = 0;
};

}  // namespace lla::trained
