// The support matrix of the README, cell by cell, against what the implementations say themselves (for an H200, so that
// the GPU columns are tested on any machine that compiled them).
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "plan/implementation.hpp"

namespace lla::core {
namespace {

struct Feature {
  const char* row;  // first cell of its row in the README
  void (*apply)(Problem&);
};

const Feature kFeatures[] = {
    {"bf16, f16", [](Problem& p) { p.dtype = p.out_dtype = DType::bf16; }},
    {"bf16, f16 in, f32 out", [](Problem& p) { p.dtype = DType::f16, p.out_dtype = DType::f32; }},
    {"f32", [](Problem& p) { p.dtype = p.out_dtype = DType::f32; }},
    {"f32 where TF32 is allowed",
     [](Problem& p) {
       p.dtype = p.out_dtype = DType::f32;
       p.precision = Precision::tf32;
     }},
    {"f64", [](Problem& p) { p.dtype = p.out_dtype = DType::f64; }},
    {"D = 64, 128", [](Problem& p) { p.dim = p.value_dim = 128; }},
    {"D a multiple of 8 up to 128", [](Problem& p) { p.dim = p.value_dim = 80; }},
    {"any D from 1 to 256", [](Problem& p) { p.dim = p.value_dim = 201; }},
    {"Dv ≠ D", [](Problem& p) { p.value_dim = 128; }},
    {"causal, full, sliding window",
     [](Problem& p) {
       p.mask = {100, 20};
     }},
    {"Lq ≠ Lk", [](Problem& p) { p.seqlen_q = p.total_q = 77; }},
    {"GQA, MQA", [](Problem& p) { p.heads_kv = 2; }},
    {"packed sequences",
     [](Problem& p) {
       p.packed = true;
       p.batch = 3;
     }},
    {"ridge per head, token, dimension", [](Problem& p) { p.ridge = RidgeShape::dimension; }},
    {"x given (Parallax)", [](Problem& p) { p.ridge = RidgeShape::none; }},
    {"solver: conjugate gradients", [](Problem& p) { p.solver = Solver::cg; }},
    {"solver: direct", [](Problem& p) { p.solver = Solver::direct; }},
    {"key-value cache, contiguous or paged",
     [](Problem& p) {
       p.cache = true;
       p.page_size = 16;
     }},
    {"... decoders and prompts in one call",
     [](Problem& p) {
       p.cache = p.packed = true;
       p.page_size = 16;
       p.batch = 3;
     }},
    {"options.batch_invariant", [](Problem& p) { p.batch_invariant = true; }},
};

// The easiest problem of each device: what a row changes is all that can be refused.
Problem easy(Operation operation, const Implementation& i) {
  Problem p;
  p.operation = operation;
  p.device = i.device;
  p.dtype = p.out_dtype = i.device == Device::cuda ? DType::bf16 : DType::f32;
  p.batch = 1;
  p.seqlen_q = p.seqlen_k = p.total_q = p.total_k = 512;
  p.heads_q = p.heads_kv = 4;
  p.dim = p.value_dim = 64;
  p.scale = 0.125;
  p.mask = {-1, 0};
  p.max_iterations = 128;
  return p;
}

std::string cell(const Implementation& i, const Feature& feature) {
  const auto takes = [&](Operation operation) {
    Problem p = easy(operation, i);
    feature.apply(p);
    if (p.cache && operation == Operation::backward) return false;  // the interface has no such call
    return i.refuse(p, h200()).empty();
  };
  const bool forward = takes(Operation::forward), backward = takes(Operation::backward);
  return forward && backward ? "yes" : forward ? "forward" : backward ? "backward" : "no";
}

std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> out;
  std::istringstream stream(line.substr(1));
  for (std::string part; std::getline(stream, part, '|');) {
    const size_t begin = part.find_first_not_of(' '), end = part.find_last_not_of(' ');
    out.push_back(begin == std::string::npos ? "" : part.substr(begin, end - begin + 1));
  }
  return out;
}

// row -> column -> cell
std::map<std::string, std::map<std::string, std::string>> readme_matrix() {
  std::ifstream file(LLA_README);
  std::map<std::string, std::map<std::string, std::string>> matrix;
  std::vector<std::string> columns;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("## ", 0) == 0) inside = line == "## Support";
    if (!inside || line.empty() || line[0] != '|' || line[1] == '-') continue;
    const std::vector<std::string> row = cells(line);
    if (columns.empty()) {
      columns = row;
      continue;
    }
    for (size_t i = 1; i < row.size() && i < columns.size(); ++i) matrix[row[0]][columns[i]] = row[i];
  }
  return matrix;
}

// The rows as they should read, to be pasted into the README.
std::string true_matrix() {
  std::string text = "| |";
  for (const Implementation* i : implementations()) text += std::string(" ") + i->name + " |";
  text += "\n|---|";
  for (size_t i = 0; i < implementations().size(); ++i) text += "---|";
  for (const Feature& feature : kFeatures) {
    text += std::string("\n| ") + feature.row + " |";
    for (const Implementation* i : implementations()) text += " " + cell(*i, feature) + " |";
  }
  return text;
}

TEST(SupportMatrix, IsWhatTheImplementationsSay) {
  auto readme = readme_matrix();
  EXPECT_EQ(readme.size(), std::size(kFeatures)) << "rows of the README's matrix";
  for (const Feature& feature : kFeatures) {
    ASSERT_EQ(readme.count(feature.row), 1u) << "no row \"" << feature.row << "\"";
    for (const Implementation* i : implementations()) {
      EXPECT_EQ(readme[feature.row][i->name], cell(*i, feature)) << feature.row << ", " << i->name;
    }
  }
  if (HasFailure()) GTEST_LOG_(INFO) << "with the implementations of this build it should read:\n" << true_matrix();
}

}  // namespace
}  // namespace lla::core
