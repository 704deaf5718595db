#include "progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include <fmt/core.h>

namespace lla::app {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr int kWidth = 32;

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{}:{:02} min", s / 60, s % 60);
  return fmt::format("{}:{:02} h", s / 3600, s / 60 % 60);
}

}  // namespace

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(std::max<int64_t>(total, 1)), enabled_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (drawn_) fmt::print(stderr, "\r\x1b[K");
}

void Progress::advance(int64_t amount) {
  done_ = std::min(done_ + amount, total_);
  if (!enabled_) return;
  const Clock::time_point now = Clock::now();
  if (now - start_ >= kPatience && now - last_draw_ >= kRedraw) draw(now);
}

void Progress::draw(Clock::time_point now) {
  last_draw_ = now;
  drawn_ = true;
  const double fraction = static_cast<double>(done_) / static_cast<double>(total_);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const int filled = static_cast<int>(fraction * kWidth);
  const std::string left = fraction > 0 ? duration(elapsed / fraction - elapsed) + " left" : "";
  fmt::print(stderr, "\r\x1b[K{} [{}{}] {:3.0f} % {}", label_, std::string(filled, '#'),
             std::string(kWidth - filled, '.'), 100 * fraction, left);
  std::fflush(stderr);
}

}  // namespace lla::app
