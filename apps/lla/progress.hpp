// A progress bar on stderr, for work that may take longer than two seconds. Draws nothing before that, and nothing at all
// when stderr is not a terminal; leaves no trace when it is done.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace lla::app {

class Progress {
 public:
  // `total` in whatever unit advance() counts.
  Progress(std::string label, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(int64_t amount = 1);

 private:
  using Clock = std::chrono::steady_clock;

  void draw(Clock::time_point now);

  std::string label_;
  int64_t total_;
  int64_t done_ = 0;
  bool enabled_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_ = start_;
};

}  // namespace lla::app
