// Whether two views share memory. Outputs may lie between the elements of other tensors (the three gradients in one
// buffer, for one), so ranges of addresses are not enough.
#pragma once

#include <span>

#include "validate/tensor_checks.hpp"

namespace lla::core {

// The bytes a view reaches, from its first to behind its last; empty for a view without elements or without data.
struct Extent {
  uintptr_t begin = 0, end = 0;
};
Extent extent_of(const Tensor& t);

// Exact for the views of real programs. Two that are so tangled that the search would take long count as overlapping.
bool overlap(const Tensor& a, const Tensor& b);

// What a call writes must not be read by it, nor written twice.
Status distinct(std::span<const NamedTensor> read, std::span<const NamedTensor> written);

}  // namespace lla::core
