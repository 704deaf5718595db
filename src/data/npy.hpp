// NumPy's .npy files: arrays of one or two dimensions, row-major, little-endian f16, f32 or f64.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace lla::data {

struct Array {
  int64_t rows, columns;  // columns = 1 for one dimension
  std::vector<float> data;
};

// Throws std::runtime_error, with the file's name, for anything else.
Array read_npy(const std::filesystem::path&);

}  // namespace lla::data
