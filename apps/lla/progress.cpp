#include "progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include <fmt/core.h>

namespace lla::app {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr int kWidth = 32;

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(std::llround(seconds));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{}:{:02} min", s / 60, s % 60);
  return fmt::format("{}:{:02} h", s / 3600, s / 60 % 60);
}

}  // namespace

ProgressBar::ProgressBar(std::string label) : label_(std::move(label)), enabled_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_) fmt::print(stderr, "\r\x1b[K");
}

void ProgressBar::reach(double fraction) {
  fraction_ = std::clamp(fraction, 0.0, 1.0);
  if (!enabled_) return;
  const Clock::time_point now = Clock::now();
  if (now - start_ >= kPatience && now - last_draw_ >= kRedraw) draw(now);
}

void ProgressBar::draw(Clock::time_point now) {
  last_draw_ = now;
  drawn_ = true;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const int filled = static_cast<int>(fraction_ * kWidth);
  const std::string left = fraction_ > 0 ? duration(elapsed / fraction_ - elapsed) + " left" : "";
  fmt::print(stderr, "\r\x1b[K{} [{}{}] {:3.0f} % {}", label_, std::string(filled, '#'),
             std::string(kWidth - filled, '.'), 100 * fraction_, left);
  std::fflush(stderr);
}

}  // namespace lla::app
