// The rows of packed outputs behind the last sequence, zeroed on the device: only it knows where that ends.
#pragma once

#include "core/padding.hpp"

namespace lla::cuda {

Status zero_padding(const core::Padding& padding, int device, void* stream);

}  // namespace lla::cuda
