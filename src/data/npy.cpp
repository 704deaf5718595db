#include "data/npy.hpp"

#include <cstring>
#include <fstream>
#include <iterator>
#include <regex>
#include <stdexcept>
#include <string>

#include "core/convert.hpp"
#include "core/text.hpp"

namespace lla::data {

Array read_npy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(core::cat(path.string(), " could not be read"));
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const auto bad = [&](const char* why) { return std::runtime_error(core::cat(path.string(), " ", why)); };
  // "\x93NUMPY", version, the header's length (2 bytes before version 2, 4 from then on), the header, the data.
  if (bytes.size() < 12 || bytes.compare(0, 6, "\x93NUMPY") != 0) throw bad("is not a .npy file");
  const size_t width = bytes[6] == 1 ? 2 : 4;
  size_t length = 0;
  for (size_t i = 0; i < width; ++i) length |= size_t(static_cast<unsigned char>(bytes[8 + i])) << 8 * i;
  const size_t start = 8 + width + length;
  if (start > bytes.size()) throw bad("ends within its header");
  const std::string header = bytes.substr(8 + width, length);
  std::smatch type, shape;
  if (!std::regex_search(header, type, std::regex("'descr': *'<f([248])'"))) throw bad("does not hold f16, f32 or f64");
  if (header.find("'fortran_order': False") == std::string::npos) throw bad("is not row-major");
  if (!std::regex_search(header, shape, std::regex("'shape': *\\((\\d{1,9}), ?(\\d{1,9})?,?\\)")))
    throw bad("does not have one or two dimensions");
  Array a{std::stoll(shape[1]), shape[2].matched ? std::stoll(shape[2]) : 1, {}};
  const size_t size = std::stoul(type[1]), count = size_t(a.rows) * size_t(a.columns);
  if (bytes.size() - start != count * size) throw bad("does not hold as many numbers as it says");
  a.data.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const char* at = bytes.data() + start + i * size;
    if (size == 2) {
      core::f16 x;
      std::memcpy(&x, at, 2);
      a.data[i] = core::to_float(x);
    } else if (size == 4) {
      std::memcpy(&a.data[i], at, 4);
    } else {
      double x;
      std::memcpy(&x, at, 8);
      a.data[i] = static_cast<float>(x);
    }
  }
  return a;
}

}  // namespace lla::data
