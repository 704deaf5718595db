// One way to launch a kernel.
#pragma once

#include "cuda/common/runtime.hpp"

namespace lla::cuda {

// `name` says in an error's message what was launched. No blocks: nothing to do.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
              const char* name, const Arguments&... arguments) {
  if (blocks == 0) return {};
  LLA_RETURN_IF_ERROR(allow_shared_memory(kernel, shared_bytes, name));
  kernel<<<dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, stream>>>(arguments...);
  return launched(name);
}

}  // namespace lla::cuda
