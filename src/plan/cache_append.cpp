#include "plan/cache_append.hpp"

#include <cstring>

#if LLA_HAVE_CUDA
#include "cuda/common/cache_append.hpp"
#endif

namespace lla::core {
namespace {

void copy_row(const Operand& from, int64_t source, const Operand& to, int64_t target, int64_t channels, int64_t width) {
  const char* const read = static_cast<const char*>(from.data) + source * width;
  char* const write = static_cast<char*>(to.data) + target * width;
  if (from.stride[3] == 1 && to.stride[3] == 1) {
    std::memcpy(write, read, static_cast<size_t>(channels * width));
    return;
  }
  for (int64_t c = 0; c < channels; ++c)
    std::memcpy(write + c * to.stride[3] * width, read + c * from.stride[3] * width, static_cast<size_t>(width));
}

void copy_token(const CacheAppendCall& c, int64_t batch, int64_t token, const CachePlace& place) {
  for (int64_t h = 0; h < c.heads; ++h) {
    const auto from = [&](const Operand& t) { return batch * t.stride[0] + token * t.stride[1] + h * t.stride[2]; };
    copy_row(c.k, from(c.k), c.k_cache, place.offset(c.k_cache, h), c.dim, c.width);
    copy_row(c.v, from(c.v), c.v_cache, place.offset(c.v_cache, h), c.value_dim, c.width);
  }
}

// validate has read lengths, pages and slots: everything fits.
void append_on_host(const CacheAppendCall& c) {
  if (c.by_slots) {
    for (int64_t i = 0; i < c.batch * c.length; ++i) {
      if (c.slots[i] >= 0) copy_token(c, i / c.length, i % c.length, place_of_slot(c, c.slots[i]));
      if (c.status) c.status[i] = LLA_ROW_OK;
    }
    return;
  }
  for (int64_t b = 0; b < c.batch; ++b) {
    const NewTokens n = new_tokens(c, b);
    for (int64_t t = 0; t < n.count; ++t) copy_token(c, n.batch, n.first + t, place_of_key(c, b, n.position + t));
    if (c.status) c.status[b] = LLA_ROW_OK;
    if (c.new_lengths) c.new_lengths[b] = new_length(n);
  }
}

}  // namespace

Status append(const CacheAppendCall& call) {
#if LLA_HAVE_CUDA
  if (call.device == Device::cuda) return cuda::append(call);
#endif
  if (call.device == Device::cuda) return {LLA_UNSUPPORTED, "lla_cache_append: this build has no CUDA"};
  append_on_host(call);
  return {};
}

}  // namespace lla::core
