// lla: Local Linear Attention. The C++20 interface: a thin, header-only layer over lla.h.
//
//     lla::ForwardArgs args;
//     args.q = lla::dense(q.data(), lla::DType::f32, {B, L, H, D});   // k, v, o alike
//     args.ridge = lla::scalar(&lambda);
//     lla::Workspace workspace(args);
//     if (lla::Status s = lla::forward(args); !s) std::puts(s.message().c_str());
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "lla/lla.h"

namespace lla {

enum class DType : int32_t {
  none = LLA_DTYPE_NONE,
  f32 = LLA_F32,
  f64 = LLA_F64,
  bf16 = LLA_BF16,
  f16 = LLA_F16,
  i32 = LLA_I32,
  i64 = LLA_I64
};
enum class Solver : int32_t { automatic = LLA_SOLVER_AUTO, cg = LLA_SOLVER_CG, direct = LLA_SOLVER_DIRECT };
enum class Weights : int32_t {
  automatic = LLA_WEIGHTS_AUTO,
  recompute = LLA_WEIGHTS_RECOMPUTE,
  cached = LLA_WEIGHTS_CACHED
};
enum class Precision : int32_t { full = LLA_PRECISION_FULL, tf32 = LLA_PRECISION_TF32 };

// Result of a call: a code and, when it failed, the reason.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(lla_status code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status last(lla_status code) { return code == LLA_OK ? Status() : Status(code, lla_last_error()); }
  explicit operator bool() const { return code_ == LLA_OK; }
  lla_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  lla_status code_ = LLA_OK;
  std::string message_;
};

using Tensor = lla_tensor;

// A view with explicit strides, in elements. `cuda_device` < 0 means host memory.
inline Tensor strided(const void* data, DType dtype, std::initializer_list<int64_t> size,
                      std::initializer_list<int64_t> stride, int cuda_device = -1) {
  Tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = static_cast<int32_t>(dtype);
  t.device_type = cuda_device < 0 ? LLA_CPU : LLA_CUDA;
  t.device_index = cuda_device < 0 ? 0 : cuda_device;
  t.ndim = static_cast<int32_t>(size.size());  // more than LLA_MAX_DIMS: the call refuses it
  std::copy_n(size.begin(), std::min<size_t>(size.size(), LLA_MAX_DIMS), t.size);
  std::copy_n(stride.begin(), std::min<size_t>(stride.size(), LLA_MAX_DIMS), t.stride);
  return t;
}

// A row-major view.
inline Tensor dense(const void* data, DType dtype, std::initializer_list<int64_t> size, int cuda_device = -1) {
  Tensor t = strided(data, dtype, size, {}, cuda_device);
  int64_t stride = 1;
  for (int i = std::min<int>(t.ndim, LLA_MAX_DIMS) - 1; i >= 0; --i) {
    t.stride[i] = stride;
    // Sizes too large to multiply are the call's to refuse, not for this to overflow on.
    stride = static_cast<int64_t>(static_cast<uint64_t>(stride) * static_cast<uint64_t>(t.size[i] > 0 ? t.size[i] : 1));
  }
  return t;
}

inline Tensor scalar(const void* data, DType dtype = DType::f32, int cuda_device = -1) {
  return dense(data, dtype, {}, cuda_device);
}

struct Options : lla_options {
  Options() { lla_options_init(this); }
};

namespace detail {
inline void init(lla_forward_args* args) { lla_forward_args_init(args); }
inline void init(lla_backward_args* args) { lla_backward_args_init(args); }

// Arguments that own their options: in C++ `args.options` is the struct, and the C struct's pointer points to it.
template <class Args>
struct WithOptions : Args {
  using Base = Args;
  Options options;

  WithOptions() {
    init(this);
    Args::options = &options;
  }
  WithOptions(const WithOptions& other) : Args(other), options(other.options) { Args::options = &options; }
  WithOptions& operator=(const WithOptions& other) {
    Args::operator=(other);
    options = other.options;
    Args::options = &options;
    return *this;
  }
};
}  // namespace detail

struct ForwardArgs : detail::WithOptions<lla_forward_args> {};
struct BackwardArgs : detail::WithOptions<lla_backward_args> {};
struct CacheAppendArgs : lla_cache_append_args {
  CacheAppendArgs() { lla_cache_append_args_init(this); }
};
struct ForwardSizes : lla_forward_sizes {
  ForwardSizes() : lla_forward_sizes{} { struct_size = sizeof(lla_forward_sizes); }
};
struct BackwardSizes : lla_backward_sizes {
  BackwardSizes() : lla_backward_sizes{} { struct_size = sizeof(lla_backward_sizes); }
};

inline Status forward(const ForwardArgs& args) { return Status::last(lla_forward(&args)); }
inline Status backward(const BackwardArgs& args) { return Status::last(lla_backward(&args)); }
inline Status cache_append(const CacheAppendArgs& args) { return Status::last(lla_cache_append(&args)); }
inline Status query(const ForwardArgs& args, ForwardSizes& sizes) {
  return Status::last(lla_forward_query(&args, &sizes));
}
inline Status query(const BackwardArgs& args, BackwardSizes& sizes) {
  return Status::last(lla_backward_query(&args, &sizes));
}
inline Status workspace_bytes(const ForwardArgs& args, size_t& bytes) {
  ForwardSizes sizes;
  Status status = query(args, sizes);
  bytes = sizes.workspace_bytes;
  return status;
}
inline Status workspace_bytes(const BackwardArgs& args, size_t& bytes) {
  BackwardSizes sizes;
  Status status = query(args, sizes);
  bytes = sizes.workspace_bytes;
  return status;
}

// Host workspace for calls on the CPU: sized for the arguments, attached to them, freed with this object.
// When the arguments are bad it stays empty and the call itself reports why.
class Workspace {
 public:
  template <class Args>
  explicit Workspace(Args& args) {
    size_t bytes = 0;
    if (!workspace_bytes(args, bytes) || bytes == 0) return;
    memory_.reset(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment})));
    args.workspace = memory_.get();
    args.workspace_bytes = bytes;
  }

 private:
  static constexpr size_t kAlignment = 256;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace lla
