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

// The same for a kernel that may begin while the one before it in the stream still runs: before it looks at memory it
// waits for that one to end (wait_for_last_kernel). Hides what a launch costs.
template <class... Parameters, class... Arguments>
Status launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                    const char* name, const Arguments&... arguments) {
  if (blocks.x == 0) return {};
  LLA_RETURN_IF_ERROR(allow_shared_memory(kernel, shared_bytes, name));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return to_status(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

}  // namespace lla::cuda
