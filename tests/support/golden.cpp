#include "support/golden.hpp"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>

namespace lla::test {
namespace {

struct Array {
  std::vector<int64_t> size;
  std::vector<double> values;
};
using Arrays = std::map<std::string, Array>;

template <class T>
T read(std::istream& in) {
  T value{};
  in.read(reinterpret_cast<char*>(&value), sizeof(T));
  return value;
}

// Case -> its arrays; the format is described in tools/convert_golden.py.
std::map<std::string, Arrays> read_cases(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  char magic[8] = {};
  in.read(magic, sizeof(magic));
  if (!in || std::memcmp(magic, "LLAGOLD1", sizeof(magic)) != 0) throw std::runtime_error(path + ": not a golden file");
  std::map<std::string, Arrays> cases;
  while (in.peek() != std::ifstream::traits_type::eof()) {
    std::string name(read<uint32_t>(in), '\0');
    in.read(name.data(), static_cast<std::streamsize>(name.size()));
    Array array;
    array.size.resize(read<uint32_t>(in));
    size_t count = 1;
    for (int64_t& n : array.size) count *= static_cast<size_t>(n = read<int64_t>(in));
    array.values.resize(count);
    in.read(reinterpret_cast<char*>(array.values.data()), static_cast<std::streamsize>(count * sizeof(double)));
    if (!in) throw std::runtime_error(path + ": ends within " + name);
    const size_t slash = name.find('/');
    cases[name.substr(0, slash)][name.substr(slash + 1)] = std::move(array);
  }
  return cases;
}

RidgeShape ridge_shape(const Arrays& arrays, bool packed) {
  const auto found = arrays.find("ridge");
  if (found == arrays.end()) return RidgeShape::none;
  const size_t ndim = found->second.size.size() + (packed ? 1 : 0);
  return found->second.size.empty() ? RidgeShape::scalar
         : ndim == 1                ? RidgeShape::head
         : ndim == 3                ? RidgeShape::token
                                    : RidgeShape::dimension;
}

GoldenCase make_case(const std::string& name, Arrays& arrays) {
  const auto values = [&](const char* array) {
    return arrays.count(array) ? arrays[array].values : std::vector<double>();
  };
  GoldenCase c;
  c.name = name;
  Spec& s = c.spec;
  s.dtype = DType::f64;
  const bool packed = arrays.count("cu_seqlens") > 0;
  for (double position : values("cu_seqlens")) s.cu_q.push_back(static_cast<int32_t>(position));
  s.cu_k = s.cu_q;
  const auto size = [&](const char* array, size_t dimension) {
    return arrays[array].size[dimension - (packed ? 1 : 0)];
  };
  s.batch = packed ? 1 : size("q", 0);
  s.length_q = size("q", 1);
  s.length_k = size("k", 1);
  s.heads_q = size("q", 2);
  s.heads_kv = size("k", 2);
  s.dim = size("q", 3);
  s.value_dim = size("v", 3);
  s.ridge = ridge_shape(arrays, packed);
  const std::vector<double> options = values("options");
  s.options.scale = options.at(0);
  s.options.causal = static_cast<int32_t>(options.at(1));
  s.options.window_left = static_cast<int64_t>(options.at(2));
  s.options.window_right = static_cast<int64_t>(options.at(3));
  c.inputs = {values("q"), values("k"), values("v"), values("ridge"), values("x"), values("g")};
  c.o = values("o");
  c.gradients.dq = values("dq");
  c.gradients.dk = values("dk");
  c.gradients.dv = values("dv");
  c.gradients.dridge = values("dridge");
  c.gradients.dx = values("dx");
  return c;
}

}  // namespace

std::string test_data_file(const std::string& name) {
  const char* folder = std::getenv("LLA_TEST_DATA");
  return std::string(folder ? folder : LLA_TEST_DATA_FOLDER) + "/" + name;
}

std::vector<GoldenCase> golden_cases() {
  std::vector<GoldenCase> cases;
  for (auto& [name, arrays] : read_cases(test_data_file("golden.bin"))) cases.push_back(make_case(name, arrays));
  return cases;
}

}  // namespace lla::test
