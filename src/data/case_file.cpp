#include "data/case_file.hpp"

#include <cstring>
#include <fstream>
#include <stdexcept>

#include "core/convert.hpp"
#include "core/text.hpp"

namespace lla::data {
namespace {

constexpr char kMagic[] = "LLACASE1";
constexpr uint32_t kLongestName = 4096;

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path), in_(path, std::ios::binary) {
    if (!in_) throw std::runtime_error(core::cat(path, ": cannot be read"));
    in_.seekg(0, std::ios::end);
    left_ = static_cast<uint64_t>(in_.tellg());
    in_.seekg(0);
  }

  bool done() const { return left_ == 0; }
  void take(void* to, uint64_t bytes) {
    if (bytes > left_) throw std::runtime_error(core::cat(path_, ": ends within an array"));
    in_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (!in_) throw std::runtime_error(core::cat(path_, ": cannot be read"));
    left_ -= bytes;
  }
  template <class T>
  T number() {
    T value{};
    take(&value, sizeof(T));
    return value;
  }
  uint64_t left() const { return left_; }
  [[noreturn]] void refuse(const std::string& reason) const { throw std::runtime_error(path_ + ": " + reason); }

 private:
  std::string path_;
  std::ifstream in_;
  uint64_t left_ = 0;
};

CaseArray read_array(Reader& in, const std::string& name) {
  CaseArray array;
  array.dtype = static_cast<DType>(in.number<uint32_t>());
  const int64_t bytes = core::size_of(array.dtype);
  if (bytes == 0 || array.dtype == DType::i32) in.refuse(core::cat(name, " has no type this version knows"));
  const auto dimensions = in.number<uint32_t>();
  if (dimensions > LLA_MAX_DIMS) in.refuse(core::cat(name, " has ", dimensions, " dimensions"));
  array.size.resize(dimensions);
  uint64_t count = 1;
  for (int64_t& n : array.size) {
    n = in.number<int64_t>();
    if (n < 0 || (n > 0 && count > in.left() / static_cast<uint64_t>(n)))
      in.refuse(core::cat(name, " ends beyond the file"));
    count *= static_cast<uint64_t>(n);
  }
  std::vector<unsigned char> raw(count * static_cast<uint64_t>(bytes));
  in.take(raw.data(), raw.size());
  array.values.resize(count);
  for (uint64_t i = 0; i < count; ++i) {
    array.values[i] = core::load(raw.data(), array.dtype, static_cast<int64_t>(i));
  }
  return array;
}

}  // namespace

std::map<std::string, CaseArray> read_case_file(const std::string& path) {
  Reader in(path);
  char magic[sizeof(kMagic) - 1] = {};
  if (in.left() >= sizeof(magic)) in.take(magic, sizeof(magic));
  if (std::memcmp(magic, kMagic, sizeof(magic)) != 0) in.refuse("not a file of saved inputs");
  std::map<std::string, CaseArray> arrays;
  while (!in.done()) {
    const auto length = in.number<uint32_t>();
    if (length > kLongestName) in.refuse("not a file of saved inputs");
    std::string name(length, '\0');
    in.take(name.data(), length);
    arrays[name] = read_array(in, name);
  }
  return arrays;
}

}  // namespace lla::data
