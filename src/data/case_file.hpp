// Named arrays in a file: the inputs of a call that somebody wants to see again. `lla check --replay` reads it, the
// Python package's `check` writes it (python/lla/_case.py), and tests/golden/cases.bin holds heads of real models in
// it.
//
// The 8 bytes "LLACASE1", then one record an array until the end of the file, little-endian: uint32 length of the name,
// the name, uint32 lla_dtype, uint32 number of dimensions, int64 each size, the elements in row-major order.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lla/lla.hpp"

namespace lla::data {

struct CaseArray {
  DType dtype = DType::none;
  std::vector<int64_t> size;
  std::vector<double> values;
};

// By name. Throws std::runtime_error, with the path and the reason, when the file is not one of these.
std::map<std::string, CaseArray> read_case_file(const std::string& path);

}  // namespace lla::data
