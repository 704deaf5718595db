#include "text/corpus.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>

#include <fmt/core.h>

#include "text/digest.hpp"

namespace lla::trained {
namespace {

namespace fs = std::filesystem;
using experiments::Failure;
using experiments::Json;

constexpr size_t kWindow = 64;
constexpr uint64_t kBase = 0x9e3779b97f4a7c15;  // odd: the rolling hash is a polynomial in it, modulo 2^64

uint64_t mixed(uint64_t h) {
  h ^= h >> 31, h *= 0xbf58476d1ce4e5b9, h ^= h >> 29;
  return h;
}

// f(hash) for every window of a text, in order.
template <class F>
void windows(std::string_view text, F&& f) {
  if (text.size() < kWindow) return;
  uint64_t h = 0, top = 1;
  for (size_t i = 0; i < kWindow; ++i) h = h * kBase + static_cast<unsigned char>(text[i]);
  for (size_t i = 1; i < kWindow; ++i) top *= kBase;
  f(mixed(h));
  for (size_t i = kWindow; i < text.size(); ++i) {
    h = (h - top * static_cast<unsigned char>(text[i - kWindow])) * kBase + static_cast<unsigned char>(text[i]);
    f(mixed(h));
  }
}

struct File {
  std::string name, bytes, digest;
};

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The .py files below a folder, by name, without those below a folder that is skipped.
std::vector<File> python_files(const fs::path& root, const std::string& prefix, const std::set<std::string>& skipped) {
  std::vector<std::string> names;
  for (auto it = fs::recursive_directory_iterator(root, fs::directory_options::skip_permission_denied);
       it != fs::recursive_directory_iterator(); ++it) {
    if (it->is_directory() && skipped.count(it->path().filename().string()) > 0)
      it.disable_recursion_pending();
    else if (it->path().extension() == ".py" && it->is_regular_file()) {
      names.push_back(it->path().lexically_relative(root).generic_string());
    }
  }
  std::sort(names.begin(), names.end());
  std::vector<File> files;
  for (const std::string& name : names) {
    File file{prefix + "/" + name, read(root / name) + "\n", ""};
    file.digest = sha256(file.bytes);
    files.push_back(std::move(file));
  }
  return files;
}

// Drops what was seen before, and remembers the rest.
size_t drop_repeats(std::vector<File>& files, std::set<std::string>& seen) {
  const size_t before = files.size();
  std::erase_if(files, [&](const File& f) { return !seen.insert(f.digest).second; });
  return before - files.size();
}

size_t drop_shared(std::vector<File>& files, const std::vector<std::string_view>& training, double most) {
  std::vector<std::string_view> texts;
  for (const File& f : files) texts.push_back(f.bytes);
  const std::vector<double> shares = shared_windows(texts, training);
  std::vector<File> kept;
  for (size_t i = 0; i < files.size(); ++i) {
    if (shares[i] <= most) kept.push_back(std::move(files[i]));
  }
  const size_t dropped = files.size() - kept.size();
  files = std::move(kept);
  return dropped;
}

std::vector<uint8_t> joined(const std::vector<File>& files) {
  std::vector<uint8_t> out;
  for (const File& f : files) out.insert(out.end(), f.bytes.begin(), f.bytes.end());
  return out;
}

Json described(const std::vector<File>& files, const std::vector<uint8_t>& bytes) {
  return {{"files", files.size()},
          {"bytes", bytes.size()},
          {"sha256", sha256({reinterpret_cast<const char*>(bytes.data()), bytes.size()})}};
}

}  // namespace

std::vector<double> shared_windows(const std::vector<std::string_view>& texts,
                                   const std::vector<std::string_view>& training) {
  std::vector<uint64_t> wanted;
  for (const auto text : texts) windows(text, [&](uint64_t h) { wanted.push_back(h); });
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  // Most windows of the training text are nobody's: a bit for each of 2^28 classes says so at once.
  constexpr int kBits = 28;
  std::vector<bool> maybe(size_t{1} << kBits);
  for (const uint64_t h : wanted) maybe[h >> (64 - kBits)] = true;
  std::vector<bool> found(wanted.size());
  for (const auto text : training) {
    windows(text, [&](uint64_t h) {
      if (!maybe[h >> (64 - kBits)]) return;
      const auto at = std::lower_bound(wanted.begin(), wanted.end(), h);
      if (at != wanted.end() && *at == h) found[at - wanted.begin()] = true;
    });
  }
  std::vector<double> shares;
  for (const auto text : texts) {
    int64_t all = 0, shared = 0;
    windows(text, [&](uint64_t h) {
      ++all;
      shared += found[std::lower_bound(wanted.begin(), wanted.end(), h) - wanted.begin()];
    });
    shares.push_back(all == 0 ? 1 : double(shared) / double(all));
  }
  return shares;
}

Corpus read_corpus(const CorpusOptions& options) {
  std::vector<File> training, validation;
  for (const std::string& package : options.packages) {
    const fs::path root = options.site_packages / package;
    if (!fs::is_directory(root))
      throw Failure(fmt::format("{} is not a folder: the corpus needs {}", root.string(), package));
    for (File& file : python_files(root, package, {"__pycache__"})) {
      // As in Python, the folder of a file right below its package is written "package/.".
      std::string folder = fs::path(file.name).parent_path().generic_string();
      if (folder == package) folder += "/.";
      (crc32(folder) % 50 == 0 ? validation : training).push_back(std::move(file));
    }
  }
  if (!fs::is_directory(options.standard_library)) {
    throw Failure(fmt::format("{} is not a folder: give Python's standard library", options.standard_library.string()));
  }
  // Some distributions leave the tests out: nobody gets them.
  std::vector<File> test =
      python_files(options.standard_library, "python",
                   {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"});
  std::set<std::string> seen;
  Json repeats, shared;
  repeats["training"] = drop_repeats(training, seen);
  repeats["validation"] = drop_repeats(validation, seen);
  repeats["test"] = drop_repeats(test, seen);
  std::vector<std::string_view> texts;
  for (const File& f : training) texts.push_back(f.bytes);
  shared["validation"] = drop_shared(validation, texts, options.most_shared);
  std::sort(test.begin(), test.end(), [](const File& a, const File& b) { return a.digest < b.digest; });
  shared["test"] = drop_shared(test, texts, options.most_shared);
  int64_t total = 0;
  size_t count = 0;
  for (; count < test.size() && total < options.test_bytes; ++count) total += int64_t(test[count].bytes.size());
  test.resize(count);

  Corpus out;
  out.training = joined(training), out.validation = joined(validation), out.test = joined(test);
  for (const File& f : test) {
    out.test_names.push_back(f.name);
    out.test_lengths.push_back(static_cast<int64_t>(f.bytes.size()));
  }
  Json versions = Json::object();  // as a help to whoever finds other files
  for (const auto& entry : fs::directory_iterator(options.site_packages)) {
    const std::string name = entry.path().filename().string();
    for (const std::string& package : options.packages) {
      if (name.starts_with(package + "-") && name.ends_with(".dist-info")) {
        versions[package] = name.substr(package.size() + 1, name.size() - package.size() - 11);
      }
    }
  }
  versions["standard library"] = options.standard_library.filename().string();
  out.manifest = {{"versions", versions},
                  {"training", described(training, out.training)},
                  {"validation", described(validation, out.validation)},
                  {"test", described(test, out.test)},
                  {"dropped_as_repeats", repeats},
                  {"dropped_as_shared", shared}};
  return out;
}

}  // namespace lla::trained
