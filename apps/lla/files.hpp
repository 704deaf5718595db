// Files a command writes: known to be writable before the work starts, complete or an error when it ends.
#pragma once

#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

namespace lla::app {

// Throws std::runtime_error with the reason when the file could not be written; leaves its contents alone.
inline void require_writable(const std::string& path) {
  errno = 0;
  if (!std::ofstream(path, std::ios::app))
    throw std::runtime_error("cannot write " + path + ": " + std::strerror(errno));
}

inline void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

}  // namespace lla::app
