// One run at a time in a results folder. The lock is the kernel's, on a file in the folder: it goes with the process
// that holds it, however that ends.
#pragma once

#include <filesystem>

namespace lla::experiments {

class FolderLock {
 public:
  // Throws a Failure that names the folder, and the process at work in it.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace lla::experiments
