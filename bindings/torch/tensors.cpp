#include "tensors.hpp"

#include <stdexcept>
#include <string>

// Lives in libtorch_cuda, which a torch without CUDA does not have; declared here because torch's header shows it to
// CUDA builds only. The stable ABI's own Stream has an id but no cudaStream_t.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace lla::torch_ops {
namespace {

lla_dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return LLA_F32;
    case ScalarType::Double: return LLA_F64;
    case ScalarType::BFloat16: return LLA_BF16;
    case ScalarType::Half: return LLA_F16;
    case ScalarType::Int: return LLA_I32;
    case ScalarType::Long: return LLA_I64;
    default: return LLA_DTYPE_NONE;
  }
}

Tensor empty(const int64_t* size, int64_t dims, int32_t shim_dtype, int32_t device_type, int32_t device_index) {
  int64_t stride[LLA_MAX_DIMS];
  int64_t next = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    stride[i] = next;
    next *= size[i] > 0 ? size[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dims, size, stride, shim_dtype, device_type, device_index, &handle) !=
      AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("lla: out of memory: torch could not allocate " + std::to_string(next) + " elements");
  }
  return Tensor(handle);
}

int32_t shim_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return aoti_torch_dtype_float64();
    case ScalarType::Int: return aoti_torch_dtype_int32();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::Byte: return aoti_torch_dtype_uint8();
    default: return aoti_torch_dtype_float32();
  }
}

int32_t device_type_of(const Tensor& tensor) {
  return tensor.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
}

}  // namespace

lla_tensor view(const Tensor& tensor, const char* name) {
  lla_tensor t{};
  t.dtype = dtype_of(tensor);
  if (t.dtype == LLA_DTYPE_NONE) {
    throw std::runtime_error(std::string("lla: invalid argument: ") + name +
                             " must be float32, float64, bfloat16 or float16 (cu_seqlens int32)");
  }
  const auto size = tensor.sizes();
  const auto stride = tensor.strides();
  if (size.size() > LLA_MAX_DIMS) {
    throw std::runtime_error(std::string("lla: invalid argument: ") + name + " has " + std::to_string(size.size()) +
                             " dimensions, at most 4 have a meaning");
  }
  t.data = tensor.data_ptr();
  t.device_type = tensor.is_cuda() ? LLA_CUDA : LLA_CPU;
  t.device_index = tensor.is_cuda() ? tensor.get_device_index() : 0;
  t.ndim = static_cast<int32_t>(size.size());
  for (int i = 0; i < t.ndim; ++i) {
    t.size[i] = size[i];
    t.stride[i] = stride[i];
  }
  return t;
}

lla_tensor view(const std::optional<Tensor>& tensor, const char* name) {
  return tensor ? view(*tensor, name) : lla_tensor{};
}

Tensor empty(const int64_t* size, int64_t dims, ScalarType dtype, const Tensor& like) {
  return empty(size, dims, shim_dtype(dtype), device_type_of(like), like.get_device_index());
}

Tensor empty(std::initializer_list<int64_t> size, ScalarType dtype, const Tensor& like) {
  return empty(size.begin(), static_cast<int64_t>(size.size()), dtype, like);
}

Tensor empty_cpu(int64_t bytes) { return empty(&bytes, 1, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), -1); }

Tensor empty_like(const Tensor& like) {
  const auto size = like.sizes();
  return empty(size.data(), static_cast<int64_t>(size.size()), shim_dtype(like.scalar_type()), device_type_of(like),
               like.get_device_index());
}

Workspace::Workspace(size_t bytes, const Tensor& like) {
  if (bytes == 0) return;
  constexpr uintptr_t kAlignment = 256;  // lla.h's; torch's CPU allocator gives 64
  memory_ = empty({static_cast<int64_t>(bytes + kAlignment - 1)}, ScalarType::Byte, like);
  data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_->data_ptr()) + kAlignment - 1) / kAlignment *
                                  kAlignment);
}

void* current_stream(const Tensor& tensor) {
  if (!tensor.is_cuda()) return nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr) throw std::runtime_error("lla: this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

void adopt_torch_threads() {
  uint32_t threads = 0;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  if (lla_get_num_threads() != static_cast<int32_t>(threads)) lla_set_num_threads(static_cast<int32_t>(threads));
}

}  // namespace lla::torch_ops
