// Writes new keys and values into a cache, on the device they are on.
#pragma once

#include "core/cache_append.hpp"

namespace lla::core {

// Of a checked call. On CUDA it joins the call's stream; nothing waits.
Status append(const CacheAppendCall& call);

}  // namespace lla::core
