// Small text helpers for messages and plans.
#pragma once

#include <locale>
#include <sstream>
#include <string>

#include "lla/lla.hpp"

namespace lla::core {

// Concatenates its arguments as a stream would print them, whatever the program's locale makes of numbers.
template <class... Args>
std::string cat(const Args&... args) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << args);
  return out.str();
}

inline const char* name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::none: break;
  }
  return "none";
}

inline int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::none: break;
  }
  return 0;
}

// "(2, 128, 8, 64)"
inline std::string shape_text(const Tensor& t) {
  std::string out = "(";
  for (int i = 0; i < t.ndim; ++i) out += (i ? ", " : "") + std::to_string(t.size[i]);
  return out + ")";
}

inline Status invalid(const std::string& message) { return {LLA_INVALID_ARGUMENT, message}; }

}  // namespace lla::core

// Returns the status of an expression from the enclosing function when it is a failure.
#define LLA_RETURN_IF_ERROR(expression)                                 \
  do {                                                                  \
    if (::lla::Status status_ = (expression); !status_) return status_; \
  } while (false)
