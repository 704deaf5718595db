#include "common/folder_lock.hpp"

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <fmt/core.h>

#include "common/results.hpp"

namespace lla::experiments {

FolderLock::FolderLock(const fs::path& folder) {
  const fs::path path = folder / ".lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd_ < 0) throw Failure(fmt::format("{} could not be written: {}", path.string(), std::strerror(errno)));
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    char owner[32] = {};
    const ssize_t read = ::pread(fd_, owner, sizeof owner - 1, 0);
    ::close(std::exchange(fd_, -1));
    if (error != EWOULDBLOCK) {
      throw Failure(fmt::format("{} could not be locked: {}", path.string(), std::strerror(error)));
    }
    const std::string name = read > 0 ? fmt::format(" (process {})", owner) : "";
    throw Failure(
        fmt::format("another run{} is at work in {}; wait for it or choose another --out", name, folder.string()));
  }
  // For the message above; whoever cannot read it still finds the lock.
  const std::string mine = std::to_string(::getpid());
  if (::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, mine.data(), mine.size(), 0) < 0) errno = 0;
}

FolderLock::FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace lla::experiments
