// What is taken off every key of a head before anything is computed with it. LLA does not change under k - c with
// q - mean as it was (logits move by a constant per row), but products with keys that have a large common mean lose
// digits to that mean.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace lla::core {

// Keys it is made from, evenly spaced among those that some row sees.
inline constexpr int64_t kShiftSample = 32;
constexpr int64_t shift_sample(int64_t begin, int64_t keys, int64_t i, int64_t sample) {
  return begin + (2 * i + 1) * keys / (2 * sample);
}

// One channel of the sample: sums about its first key.
struct ShiftSums {
  double first = 0, sum = 0, squares = 0;
  int64_t count = 0;

  constexpr void add(double key) {
    if (count++ == 0) first = key;
    sum += key - first;
    squares += (key - first) * (key - first);
  }

  // A channel is shifted where its mean is more than twice its spread, by the mean rounded to a power of two near the
  // spread: a number of few digits, so that k - shift is exact, or as good as exact where a key is far from the others.
  template <class T>
  constexpr T shift() const {
    if (count < 2) return 0;
    const double n = static_cast<double>(count), offset = sum / n, mean = first + offset;
    const double spread = std::sqrt(std::max(0.0, squares / n - offset * offset));
    if (!(std::abs(mean) > 2 * spread)) return 0;
    const double grid = std::ldexp(1.0, std::ilogb(std::max(spread, std::abs(mean) * 0x1p-20)));
    return static_cast<T>(std::round(mean / grid) * grid);
  }
};

}  // namespace lla::core
