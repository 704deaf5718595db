#include "validate/tensor_checks.hpp"

#include <algorithm>
#include <cstdint>

namespace lla::core {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 60;  // more than any address space; twice as much still fits int64

// Whether the number of elements and the span of memory they cover, in bytes, can both be counted.
bool fits(const Tensor& t) {
  if (empty(t)) return true;
  const int64_t width = size_of(dtype_of(t));
  int64_t count = width;
  int64_t span = width;
  for (int i = 0; i < t.ndim; ++i) {
    int64_t step;
    if (__builtin_mul_overflow(count, t.size[i], &count)) return false;
    if (__builtin_mul_overflow(t.size[i] - 1, t.stride[i], &step)) return false;
    if (__builtin_mul_overflow(step, width, &step)) return false;
    if (__builtin_add_overflow(span, step, &span)) return false;
  }
  if (count > kMostBytes || span > kMostBytes) return false;
  // The last byte has an address.
  return reinterpret_cast<uintptr_t>(t.data) <= UINTPTR_MAX - static_cast<uintptr_t>(span);
}

}  // namespace

Status check_view(const NamedTensor& arg, Pointers pointers) {
  const Tensor& t = arg.tensor;
  if (t.dtype < LLA_F32 || t.dtype > LLA_I64)
    return invalid(cat(arg.name, ": dtype ", t.dtype, " is not an lla_dtype"));
  if (t.device_type != LLA_CPU && t.device_type != LLA_CUDA) {
    return invalid(cat(arg.name, ": device_type ", t.device_type, " is neither LLA_CPU nor LLA_CUDA"));
  }
  if (t.device_index < 0 || (t.device_type == LLA_CPU && t.device_index != 0)) {
    return invalid(cat(arg.name, ": device_index ", t.device_index, " does not exist"));
  }
  if (t.ndim < 0 || t.ndim > LLA_MAX_DIMS)
    return invalid(cat(arg.name, ": ndim is ", t.ndim, ", must be 0 to ", LLA_MAX_DIMS));
  for (int i = 0; i < t.ndim; ++i) {
    if (t.size[i] < 0)
      return invalid(cat(arg.name, ": size of dimension ", i, " is ", t.size[i], ", must not be negative"));
    if (t.stride[i] < 0)
      return invalid(cat(arg.name, ": stride of dimension ", i, " is ", t.stride[i], ", must not be negative"));
  }
  if (!fits(t))
    return invalid(
        cat(arg.name, ": shape ", shape_text(t), " with its strides spans more bytes than an address can count"));
  if (pointers == Pointers::required && t.data == nullptr && !empty(t)) {
    return invalid(cat(arg.name, ": data is null but the shape ", shape_text(t), " is not empty"));
  }
  const int64_t width = size_of(dtype_of(t));
  if (reinterpret_cast<uintptr_t>(t.data) % width != 0) {
    return invalid(cat(arg.name, ": data is not aligned to its element size, ", width, " bytes"));
  }
  return {};
}

Status check_writable(const NamedTensor& arg) {
  const Tensor& t = arg.tensor;
  if (empty(t)) return {};
  // From the smallest stride up, each step must leave all that the smaller ones reach. Dimensions of size 1 never step.
  int order[LLA_MAX_DIMS];
  int* end = order;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.size[d] > 1) *end++ = d;
  }
  std::sort(order, end, [&](int a, int b) { return t.stride[a] < t.stride[b]; });
  int64_t reach = 0;
  for (const int* next = order; next != end; ++next) {
    const int d = *next;
    if (t.stride[d] <= reach) {
      return invalid(cat(arg.name, ": is written to, but stride ", t.stride[d], " of dimension ", d,
                         " makes its elements overlap (needs more than ", reach, ")"));
    }
    reach += (t.size[d] - 1) * t.stride[d];
  }
  return {};
}

Status check_contiguous(const NamedTensor& arg) {
  const Tensor& t = arg.tensor;
  if (empty(t)) return {};
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.size[i] != 1 && t.stride[i] != stride) {
      return invalid(
          cat(arg.name, ": must be dense, but stride of dimension ", i, " is ", t.stride[i], " instead of ", stride));
    }
    stride *= t.size[i];
  }
  return {};
}

Status same_device(const NamedTensor& arg, const Tensor& q) {
  const Tensor& t = arg.tensor;
  if (t.device_type == q.device_type && t.device_index == q.device_index) return {};
  const auto text = [](const Tensor& x) {
    return x.device_type == LLA_CPU ? std::string("cpu") : cat("cuda:", x.device_index);
  };
  return invalid(cat(arg.name, ": is on ", text(t), ", but q is on ", text(q)));
}

Status check_int_vector(const NamedTensor& arg, const Tensor& q, Pointers pointers, const char* meaning) {
  LLA_RETURN_IF_ERROR(check_view(arg, pointers));
  LLA_RETURN_IF_ERROR(check_dtype(arg, {DType::i32}, "i32"));
  if (arg.tensor.ndim != 1) return invalid(cat(arg.name, ": shape is ", shape_text(arg.tensor), ", must be ", meaning));
  LLA_RETURN_IF_ERROR(check_contiguous(arg));
  return same_device(arg, q);
}

}  // namespace lla::core
