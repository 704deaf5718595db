// New keys and values into a cache on the device: lengths, pages and slots are read there.
#pragma once

#include "core/cache_append.hpp"

namespace lla::cuda {

Status append(const core::CacheAppendCall& call);

}  // namespace lla::cuda
