// Structs of callers that were built for another size of them: one place for what a field that is not there means.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/text.hpp"

namespace lla::core {

// What each struct holds before the caller sets anything.
lla_options default_options();
template <class Args>
Args default_args() {
  Args args{};
  args.struct_size = sizeof(Args);
  return args;
}

// As `known` by this library, cut or filled with zeros to the caller's size.
template <class Struct>
void write_sized(const Struct& known, void* to, size_t size) {
  if (to == nullptr) return;
  std::memset(to, 0, size);
  std::memcpy(to, &known, std::min(size, sizeof known));
  if (size >= sizeof size) std::memcpy(to, &size, sizeof size);
}

// The fields the caller's struct has, over the defaults that `full` holds. A size that is no multiple of the alignment
// is no struct's, and could leave half an address.
template <class Struct>
Status read_sized(const char* what, const char* init, const Struct& given, Struct& full) {
  const size_t size = given.struct_size;
  if (size > sizeof full) {
    return invalid(cat(what, ": struct_size is ", size, ", this library's is ", sizeof full,
                       "; the caller was built for a newer one (or did not use ", init, ")"));
  }
  if (size < sizeof size || size % alignof(Struct) != 0)
    return invalid(cat(what, ": struct_size is ", size, ", which no version of the struct has (use ", init, ")"));
  std::memcpy(&full, &given, size);
  full.struct_size = sizeof full;
  return {};
}

// Arguments and their options, every field there. It points into itself and stays where it is.
template <class Args>
struct Complete {
  Args args = default_args<Args>();
  lla_options options = default_options();

  Complete() { args.options = &options; }
  Complete(const Complete&) = delete;
  Complete& operator=(const Complete&) = delete;

  Status read(const Args* given, const char* init) {
    if (given == nullptr) return invalid("args: is null");
    LLA_RETURN_IF_ERROR(read_sized("args", init, *given, args));
    if (args.options != nullptr) LLA_RETURN_IF_ERROR(read_sized("options", "lla_options_init", *args.options, options));
    args.options = &options;
    return {};
  }
};

}  // namespace lla::core
