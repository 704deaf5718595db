// Checks of a single tensor view. Each answers with a sentence that names the argument and the values that clash.
// Sentences are made only where a check fails: a call's host time counts for small problems.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "core/text.hpp"
#include "validate/validate.hpp"

namespace lla::core {

struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};

inline bool present(const Tensor& t) { return t.dtype != LLA_DTYPE_NONE; }
inline DType dtype_of(const Tensor& t) { return static_cast<DType>(t.dtype); }

// No elements: whatever the other sizes and the strides are, which may be anything then.
inline bool empty(const Tensor& t) {
  return std::any_of(t.size, t.size + t.ndim, [](int64_t n) { return n == 0; });
}

// Known dtype and device, 0 <= ndim <= 4, no negative size or stride, fewer than 2^60 bytes from end to end, pointer
// there and aligned.
Status check_view(const NamedTensor& t, Pointers pointers);
// No two indices may share memory.
Status check_writable(const NamedTensor& t);
Status check_contiguous(const NamedTensor& t);
Status same_device(const NamedTensor& t, const Tensor& q);
// A dense int32 vector beside q; `meaning` names its size.
Status check_int_vector(const NamedTensor& t, const Tensor& q, Pointers pointers, const char* meaning);

// `why`: the words that say what the dtype must be.
template <class... Words>
Status check_dtype(const NamedTensor& t, std::initializer_list<DType> allowed, const Words&... why) {
  const DType dtype = dtype_of(t.tensor);
  if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) return {};
  return invalid(cat(t.name, ": dtype is ", name(dtype), ", must be ", why...));
}

// `meaning`: the words that name the dimensions.
template <class... Words>
Status check_shape(const NamedTensor& t, std::initializer_list<int64_t> expected, const Words&... meaning) {
  Tensor want{};
  want.ndim = static_cast<int32_t>(expected.size());
  std::copy(expected.begin(), expected.end(), want.size);
  if (t.tensor.ndim == want.ndim && std::equal(expected.begin(), expected.end(), t.tensor.size)) return {};
  return invalid(cat(t.name, ": shape is ", shape_text(t.tensor), ", must be ", meaning..., " = ", shape_text(want)));
}

}  // namespace lla::core
