// One way to launch a kernel.
#pragma once

#include "cuda/common/runtime.hpp"

namespace lla::cuda {

namespace detail {

// The launch's own answer counts. cudaGetLastError would also hand over, and clear, whatever error the caller's earlier
// calls have left behind.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes, cudaStream_t stream,
              bool early, unsigned cluster, const char* name, const Arguments&... arguments) {
  if (blocks.x == 0) return {};
  const void* const address = reinterpret_cast<const void*>(kernel);
  LLA_RETURN_IF_ERROR(allow_shared_memory(address, shared_bytes, name));
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaErrorInvalidValue || shared_bytes <= 48 * 1024) return to_status(error, name);
  cudaGetLastError();  // the device may have been reset and know nothing of the kernel any more
  LLA_RETURN_IF_ERROR(allow_shared_memory(address, shared_bytes, name, true));
  return to_status(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

}  // namespace detail

// `name` says in an error's message what was launched. No blocks: nothing to do.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes, cudaStream_t stream,
              const char* name, const Arguments&... arguments) {
  return detail::launch(kernel, blocks, threads, shared_bytes, stream, false, 1, name, arguments...);
}
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
              const char* name, const Arguments&... arguments) {
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, stream, name, arguments...);
}

// The same for a kernel that may begin while the one before it in the stream still runs: before it looks at memory it
// waits for that one to end (wait_for_last_kernel). Hides what a launch costs.
template <class... Parameters, class... Arguments>
Status launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                    const char* name, const Arguments&... arguments) {
  return detail::launch(kernel, blocks, threads, shared_bytes, stream, true, 1, name, arguments...);
}

// The same in clusters of `cluster` blocks.
template <class... Parameters, class... Arguments>
Status launch_early_in_clusters(void (*kernel)(Parameters...), dim3 blocks, unsigned cluster, int threads,
                                size_t shared_bytes, cudaStream_t stream, const char* name,
                                const Arguments&... arguments) {
  return detail::launch(kernel, blocks, threads, shared_bytes, stream, true, cluster, name, arguments...);
}

}  // namespace lla::cuda
