#include "common/results.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/core.h>

#include "common/records.hpp"
#include "lla/lla.h"
#include "plan/machine.hpp"

namespace lla::experiments {
namespace {

[[noreturn]] void fail_to_write(const fs::path& path, int error) {
  throw Failure(
      fmt::format("{} could not be written: {}; earlier results are untouched", path.string(), std::strerror(error)));
}

// A new file beside the one it will replace. Its name is nobody's to foresee, and it is opened only where nothing of
// that name is: a link someone left there is never followed.
constexpr std::string_view kTemporary = ".lla-XXXXXX";

class TemporaryFile {
 public:
  explicit TemporaryFile(const fs::path& replaces) : path_((replaces.parent_path() / kTemporary).string()) {
    fd_ = ::mkostemp(path_.data(), O_CLOEXEC);
    if (fd_ < 0) fail_to_write(replaces, errno);
    const mode_t mask = ::umask(0);  // mkostemp gives the owner alone access
    ::umask(mask);
    ::fchmod(fd_, 0644 & ~mask);
  }
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  const char* path() const { return path_.c_str(); }
  // 0, or the error.
  int write_all(std::string_view content) {
    while (!content.empty()) {
      const ssize_t n = ::write(fd_, content.data(), content.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n < 0 ? errno : ENOSPC;
      content.remove_prefix(static_cast<size_t>(n));
    }
    if (::fsync(fd_) != 0) return errno;
    const int closed = ::close(std::exchange(fd_, -1));
    return closed == 0 ? 0 : errno;
  }

 private:
  std::string path_;
  int fd_ = -1;
};

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

std::string csv_cell(const Json& value) {
  if (!value.is_string()) return value.dump();
  std::string text = value.get<std::string>();
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

// A line of names, a line a record; the columns are the first record's scalars.
std::string csv(const Json& records) {
  if (records.empty()) return "";
  std::string text;
  std::vector<std::string> columns;
  for (const auto& [name, value] : records.front().items()) {
    if (value.is_primitive()) columns.push_back(name);
  }
  for (const auto& name : columns) text += (text.empty() ? "" : ",") + name;
  text += "\n";
  for (const auto& record : records) {
    std::string line;
    for (const auto& name : columns) line += (line.empty() ? "" : ",") + csv_cell(record.at(name));
    text += line + "\n";
  }
  return text;
}

}  // namespace

std::string shell_words(std::span<const std::string> words) {
  constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=./,:@%";
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += ' ';
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
      text += word;
      continue;
    }
    text += '\'';
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    text += '\'';
  }
  return text;
}

void write_atomically(const fs::path& path, std::string_view content) {
  TemporaryFile file(path);
  int error = file.write_all(content);
  if (error == 0 && ::rename(file.path(), path.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(file.path());
    fail_to_write(path, error);
  }
}

namespace {

void require_folder(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) throw Failure(fmt::format("{} could not be made: {}", directory.string(), error.message()));
}

}  // namespace

void require_writable_folder(const fs::path& directory) {
  require_folder(directory);
  TemporaryFile probe(directory / "results");
  ::unlink(probe.path());
}

Json read_json(const fs::path& path) {
  std::ifstream file(path);
  if (!file) throw Failure(fmt::format("{} could not be read: {}", path.string(), std::strerror(errno)));
  std::stringstream text;
  text << file.rdbuf();
  try {
    return Json::parse(text.str());
  } catch (const Json::exception&) {  // also a number no type holds
    throw Failure(fmt::format("{} is not complete JSON (half-written?); move it away or choose another directory",
                              path.string()));
  }
}

Json machine(Device device) {
  Json m = {{"processor", cpu_name()}, {"simd", core::this_cpu().simd}, {"lla", lla_version()}};
  if (device == Device::cuda) m["gpu"] = core::this_machine(0).cuda.name;
  return m;
}

Json read_results(const fs::path& path) {
  Json file = read_json(path);
  check_results_file(path, file);
  return file;
}

namespace {

// Makes and locks the directory, before anything is read or written there. What a run that was killed left half-written
// goes: nobody else is at work here.
FolderLock open_folder(const fs::path& directory) {
  require_folder(directory);
  FolderLock lock(directory);
  for (const fs::path& folder : {directory, directory / "partial"}) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.size() == kTemporary.size() && name.starts_with(".lla-")) fs::remove(entry.path(), ignored);
    }
  }
  return lock;
}

}  // namespace

Results::Results(fs::path directory, std::string task, Json settings, std::string command, Device device)
    : Results(std::move(directory), std::move(task), std::move(settings), std::move(command), machine(device)) {}

Results::Results(fs::path directory, std::string task, Json settings, std::string command, Json machine)
    : directory_(std::move(directory)),
      lock_(open_folder(directory_)),
      task_(std::move(task)),
      settings_(std::move(settings)),
      machine_(std::move(machine)),
      command_(std::move(command)) {
  const fs::path path = directory_ / kResultsName;
  if (!fs::exists(path)) {
    require_writable_folder(directory_);
    return;
  }
  const Json file = read_results(path);
  const auto require = [&](const char* what, const Json& found, const Json& wanted) {
    if (found == wanted) return;
    throw Failure(fmt::format("{} was made with {} {}, this run has {}; choose another --out", path.string(), what,
                              found.dump(), wanted.dump()));
  };
  require("task", file["task"], task_);
  require("settings", file["settings"], settings_);
  require("machine", file["machine"], machine_);
  require_writable_folder(directory_);
  records_ = file["records"];
}

bool Results::matches(const Json& record, const Json& identity) {
  for (const auto& [name, value] : identity.items()) {
    if (!record.contains(name) || record[name] != value) return false;
  }
  return true;
}

bool Results::contains(const Json& identity) const {
  for (const auto& record : records_) {
    if (matches(record, identity)) return true;
  }
  return false;
}

void Results::write() const {
  std::string text = fmt::format(
      "{{\"schema_version\": {},\n\"task\": {},\n\"settings\": {},\n\"machine\": {},\n\"command\": {},\n"
      "\"records\": [",
      kSchemaVersion, Json(task_).dump(), settings_.dump(), machine_.dump(), Json(command_).dump());
  for (size_t i = 0; i < records_.size(); ++i) text += (i == 0 ? "\n" : ",\n") + records_[i].dump();
  text += "\n]";
  if (!summary_.empty()) text += ",\n\"summary\": " + summary_.dump();
  text += "}\n";
  write_atomically(directory_ / kResultsName, text);
  write_atomically(directory_ / "results.csv", csv(records_));
}

}  // namespace lla::experiments
