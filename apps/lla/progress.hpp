// A progress bar on stderr, for work that may take longer than two seconds. Draws nothing before that, and nothing at
// all when stderr is not a terminal; leaves no trace when it is done.
#pragma once

#include <chrono>
#include <string>

namespace lla::app {

class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void reach(double fraction);  // of the work, 0 to 1

 private:
  using Clock = std::chrono::steady_clock;

  void draw(Clock::time_point now);

  std::string label_;
  double fraction_ = 0;
  bool enabled_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_ = start_;
};

}  // namespace lla::app
