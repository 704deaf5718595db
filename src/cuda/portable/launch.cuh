// Launching a kernel that is compiled per dimension bucket.
#pragma once

#include "cuda/common/runtime.hpp"
#include "cuda/portable/arguments.hpp"
#include "cuda/portable/config.hpp"

namespace lla::cuda::portable {

template <class T>
Status launch_blocks(void (*kernel)(Arguments<T>), int64_t blocks, int threads, size_t shared,
                     const Arguments<T>& arguments, cudaStream_t stream, const char* name) {
  if (blocks == 0) return {};
  LLA_RETURN_IF_ERROR(allow_shared_memory(kernel, shared, name));
  kernel<<<dim3(static_cast<unsigned>(blocks)), threads, shared, stream>>>(arguments);
  return launched(name);
}

}  // namespace lla::cuda::portable
