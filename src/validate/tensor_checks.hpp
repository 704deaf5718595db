// Checks of a single tensor view. Each answers with a sentence that names the argument and the values that clash.
#pragma once

#include <initializer_list>
#include <string>

#include "core/text.hpp"
#include "validate/validate.hpp"

namespace lla::core {

struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};

inline bool present(const Tensor& t) { return t.dtype != LLA_DTYPE_NONE; }
inline DType dtype_of(const Tensor& t) { return static_cast<DType>(t.dtype); }

int64_t element_count(const Tensor& t);  // of a checked tensor

// Known dtype and device, 0 <= ndim <= 4, no negative size or stride, an extent in bytes that fits int64, pointer there
// and aligned.
Status check_view(const NamedTensor& t, Pointers pointers);
// No two indices may share memory.
Status check_writable(const NamedTensor& t);
Status check_dtype(const NamedTensor& t, std::initializer_list<DType> allowed, const std::string& why);
Status check_shape(const NamedTensor& t, std::initializer_list<int64_t> expected, const std::string& meaning);
Status check_contiguous(const NamedTensor& t);

}  // namespace lla::core
