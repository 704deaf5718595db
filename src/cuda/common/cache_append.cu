#include <algorithm>

#include "cuda/common/cache_append.hpp"
#include "cuda/common/launch.cuh"

namespace lla::cuda {
namespace {

using core::CacheAppendCall;

constexpr int kThreads = 128;
// Blocks that share the new tokens of one sequence: each looks at all of its pages first.
constexpr int64_t kBlocksPerSequence = 64;
constexpr int64_t kMostBlocks = int64_t{1} << 20;

__device__ void copy_element(void* to, int64_t at, const void* from, int64_t source, int32_t width) {
  switch (width) {
    case 2: static_cast<uint16_t*>(to)[at] = static_cast<const uint16_t*>(from)[source]; break;
    case 4: static_cast<uint32_t*>(to)[at] = static_cast<const uint32_t*>(from)[source]; break;
    default: static_cast<uint64_t*>(to)[at] = static_cast<const uint64_t*>(from)[source]; break;
  }
}

// All threads of a block copy one token's keys and values.
__device__ void copy_token(const CacheAppendCall& c, int64_t batch, int64_t token, const core::CachePlace& place) {
  const auto copy = [&](const core::Operand& from, const core::Operand& to, int64_t channels) {
    for (int64_t n = threadIdx.x; n < c.heads * channels; n += kThreads) {
      const int64_t head = n / channels, channel = n % channels;
      const int64_t source = batch * from.stride[0] + token * from.stride[1] + head * from.stride[2];
      copy_element(to.data, place.offset(to, head) + channel * to.stride[3], from.data,
                   source + channel * from.stride[3], c.width);
    }
  };
  copy(c.k, c.k_cache, c.dim);
  copy(c.v, c.v_cache, c.value_dim);
}

// A sequence whose tokens do not all fit writes nothing.
__device__ bool fits(const CacheAppendCall& c, int64_t b, const core::NewTokens& n) {
  if (!n.valid || n.count == 0 || c.cache.table == nullptr) return n.valid;
  bool good = true;
  const int64_t last = (n.position + n.count - 1) / c.cache.page_size;
  for (int64_t entry = n.position / c.cache.page_size + threadIdx.x; entry <= last; entry += kThreads)
    good = good && c.cache.has_page(c.cache.table[b * c.cache.table_stride + entry]);
  return __syncthreads_and(good);
}

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ CacheAppendCall c, int32_t blocks) {
  const int64_t b = blockIdx.x / blocks, part = blockIdx.x % blocks;
  const core::NewTokens n = core::new_tokens(c, b);
  const bool valid = fits(c, b, n);
  if (part == 0 && threadIdx.x == 0) {
    if (c.status != nullptr) c.status[b] = valid ? LLA_ROW_OK : LLA_ROW_INVALID;
    if (c.new_lengths != nullptr) c.new_lengths[b] = core::new_length(n);
  }
  if (!valid) return;
  for (int64_t t = part; t < n.count; t += blocks)
    copy_token(c, n.batch, n.first + t, core::place_of_key(c, b, n.position + t));
}

__global__ void __launch_bounds__(kThreads) append_slots_kernel(const __grid_constant__ CacheAppendCall c) {
  for (int64_t i = blockIdx.x; i < c.batch * c.length; i += gridDim.x) {
    const int64_t slot = c.slots[i];
    const bool valid = core::is_slot(c, slot);
    if (c.status != nullptr && threadIdx.x == 0) c.status[i] = valid || slot == -1 ? LLA_ROW_OK : LLA_ROW_INVALID;
    if (valid) copy_token(c, i / c.length, i % c.length, core::place_of_slot(c, slot));
  }
}

}  // namespace

Status append(const CacheAppendCall& call) {
  const DeviceGuard guard(call.device_index);
  LLA_RETURN_IF_ERROR(guard.status());
  LLA_RETURN_IF_ERROR(check_pointers(call));
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const char* const what = "appending to a cache";
  if (call.by_slots) {
    const int64_t tokens = call.batch * call.length;
    if (tokens == 0) return {};
    return launch(append_slots_kernel, static_cast<int>(std::min(tokens, kMostBlocks)), kThreads, 0, stream, what,
                  call);
  }
  if (call.batch == 0) return {};
  if (call.batch > INT32_MAX / kBlocksPerSequence)
    return {LLA_UNSUPPORTED,
            core::cat("lla_cache_append: has ", call.batch, " sequences, more than a CUDA grid takes")};
  const int64_t blocks = std::clamp<int64_t>(call.length, 1, kBlocksPerSequence);
  return launch(append_kernel, static_cast<int>(call.batch * blocks), kThreads, 0, stream, what, call,
                static_cast<int32_t>(blocks));
}

}  // namespace lla::cuda
