// Result files. results.json holds everything a figure needs; it is replaced as a whole, by renaming a complete file
// over it, so a reader never sees half of one and a failed write leaves the earlier results as they were.
//
//   {"schema_version": 1, "task": ..., "settings": {...}, "machine": {...}, "command": ..., "records": [{...}, ...],
//    "summary": {...}}                                       (fits over the records, where a task has any)
#pragma once

#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "common/device.hpp"
#include "common/folder_lock.hpp"

namespace lla::experiments {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

inline constexpr int kSchemaVersion = 1;
inline constexpr const char* kResultsName = "results.json";

// A condition the user can act on, as one sentence.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Replaces `path` by `content`: written beside it, flushed to disk, renamed. Throws Failure and leaves `path` as it
// was.
void write_atomically(const fs::path& path, std::string_view content);

// Makes the directory and proves that it can be written to, before any work is done.
void require_writable_folder(const fs::path& directory);

Json read_json(const fs::path& path);

// Words of a command as a shell takes them: what it would read anything into stands in quotes.
std::string shell_words(std::span<const std::string> words);

// The processor and SIMD target numbers depend on.
Json machine(Device);

// The results of one task in one directory.
class Results {
 public:
  // Continues what is there, if its version, task, settings and machine are these and no other run is at work there;
  // otherwise throws and touches nothing. Holds the folder as long as it lives.
  Results(fs::path directory, std::string task, Json settings, std::string command, Device = Device::cpu);
  // With a machine described by whoever knows it better.
  Results(fs::path directory, std::string task, Json settings, std::string command, Json machine);

  const fs::path& directory() const { return directory_; }
  const Json& records() const { return records_; }
  // True when every member of `identity` is in `record` with the same value.
  static bool matches(const Json& record, const Json& identity);
  bool contains(const Json& identity) const;

  void add(Json record) { records_.push_back(std::move(record)); }
  // Something computed from all records (fits), kept beside them.
  void set_summary(const std::string& name, Json value) { summary_[name] = std::move(value); }
  // results.json and results.csv (one line a record, lists left out).
  void write() const;

 private:
  fs::path directory_;
  FolderLock lock_;
  std::string task_;
  Json settings_;
  Json machine_;
  std::string command_;
  Json records_ = Json::array();
  Json summary_ = Json::object();
};

// Reads and checks a finished results.json (used by `lla report`).
Json read_results(const fs::path& path);

}  // namespace lla::experiments
