#include "data/heads.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "core/text.hpp"
#include "data/case_file.hpp"
#include "data/npy.hpp"

namespace lla::data {
namespace {

namespace fs = std::filesystem;

// An array of a head, by its part: q, k, v, ridge, grad_o.
struct Part {
  int64_t rows = 0, columns = 0;
  std::vector<double> values;
};
using Parts = std::map<std::string, Part>;

std::map<std::string, Parts> read_folder(const fs::path& folder) {
  std::map<std::string, Parts> heads;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string file = entry.path().filename().string();
    for (const auto& [ending, part] : {std::pair("_q", "q"), std::pair("_k", "k"), std::pair("_v", "v"),
                                       std::pair("_ridge", "ridge"), std::pair("_g", "grad_o")}) {
      const std::string tail = std::string(ending) + ".npy";
      if (file.size() <= tail.size() || !file.ends_with(tail)) continue;
      const Array a = read_npy(entry.path());
      heads[file.substr(0, file.size() - tail.size())][part] = {a.rows, a.columns, {a.data.begin(), a.data.end()}};
    }
  }
  if (error) throw std::runtime_error(core::cat(folder.string(), " could not be read: ", error.message()));
  return heads;
}

std::map<std::string, Parts> read_cases(const fs::path& path) {
  std::map<std::string, Parts> heads;
  for (auto& [name, array] : read_case_file(path.string())) {
    const size_t slash = name.rfind('/');
    if (slash == std::string::npos || array.size.empty() || array.size.size() > 2) continue;
    const int64_t columns = array.size.size() == 2 ? array.size[1] : 1;
    heads[name.substr(0, slash)][name.substr(slash + 1)] = {array.size[0], columns, std::move(array.values)};
  }
  return heads;
}

}  // namespace

std::vector<TrainedHead> read_heads(const fs::path& path) {
  std::vector<TrainedHead> list;
  for (auto& [name, parts] : fs::is_directory(path) ? read_folder(path) : read_cases(path)) {
    const Part& q = parts["q"];
    const auto shaped = [&q, &parts = parts](const char* part) {
      return parts[part].rows == q.rows && parts[part].columns == q.columns;
    };
    const bool whole = q.rows > 0 && shaped("k") && shaped("v") && parts["ridge"].values.size() == size_t(q.rows) &&
                       (parts["grad_o"].rows == 0 || shaped("grad_o"));
    if (!whole) {
      throw std::runtime_error(core::cat(
          path.string(), ": ", name, " does not have q, k and v (and grad_o) of one shape, and a ridge for each row"));
    }
    list.push_back({name, q.rows, q.columns, q.values, parts["k"].values, parts["v"].values, parts["ridge"].values,
                    parts["grad_o"].values});
  }
  if (list.empty())
    throw std::runtime_error(core::cat("no head in ", path.string(), ": no NAME_q.npy, and no case NAME/q"));
  return list;
}

std::vector<TrainedHead> longest_heads(std::vector<TrainedHead> heads) {
  int64_t longest = 0;
  for (const TrainedHead& head : heads) longest = std::max(longest, head.length);
  std::erase_if(heads, [&](const TrainedHead& head) { return head.length < longest; });
  for (const TrainedHead& head : heads) {
    if (head.dim != heads[0].dim) {
      throw std::runtime_error(core::cat(head.name, " has dimension ", head.dim, ", but ", heads[0].name, " has ",
                                         heads[0].dim, ": heads that are measured together have one"));
    }
  }
  return heads;
}

std::vector<double> interleaved(const std::vector<TrainedHead>& heads, std::vector<double> TrainedHead::*part,
                                int64_t length, int64_t count) {
  const auto width = static_cast<int64_t>((heads[0].*part).size()) / heads[0].length;
  std::vector<double> out(static_cast<size_t>(length * count * width));
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t h = 0; h < count; ++h) {
      const std::vector<double>& from = heads[static_cast<size_t>(h) % heads.size()].*part;
      std::copy_n(from.begin() + i * width, width, out.begin() + (i * count + h) * width);
    }
  }
  return out;
}

}  // namespace lla::data
