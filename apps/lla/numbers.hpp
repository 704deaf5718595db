// What a word on the command line must be. Numbers: a finite one, within its range, or an error before any work is
// done. (CLI11's own checks let NaN through, and read an empty word as a number.)
#pragma once

#include <CLI/CLI.hpp>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

#include <fmt/core.h>

namespace lla::app {

inline constexpr double kLargestNumber = 1e12;  // of any option; squares and sums of such numbers are finite

namespace detail {

// Every character belongs to one number of this type.
template <class Number>
bool parse(const std::string& word, Number& number) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  return error == std::errc() && end == word.data() + word.size();
}

}  // namespace detail

// A number x with least < x (or <= where `inclusive`) that is not absurdly large.
inline CLI::Validator number_above(double least, bool inclusive = false) {
  return CLI::Validator(
      [=](std::string& word) -> std::string {
        double x = 0;
        if (detail::parse(word, x) && std::isfinite(x) && x <= kLargestNumber && (inclusive ? x >= least : x > least))
          return "";
        return fmt::format("\"{}\" is not a number {} {}, at most {:g}", word, inclusive ? "of at least" : "above",
                           least, kLargestNumber);
      },
      "", "");
}
inline CLI::Validator number_from(double least) { return number_above(least, true); }

// A file or a folder must have a name.
inline CLI::Validator not_empty() {
  return CLI::Validator([](std::string& word) -> std::string { return word.empty() ? "is empty" : ""; }, "", "");
}

inline CLI::Validator whole_number(int64_t least, int64_t most) {
  return CLI::Validator(
      [=](std::string& word) -> std::string {
        int64_t n = 0;
        if (detail::parse(word, n) && n >= least && n <= most) return "";
        return fmt::format("\"{}\" is not a whole number from {} to {}", word, least, most);
      },
      "", "");
}

}  // namespace lla::app
