// New keys and values into a cache: where each token goes, and whether its sequence fits. One rule for host and device.
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace lla::core {

struct CacheAppendCall {
  Device device = Device::cpu;
  int device_index = 0;
  int32_t width = 0;               // bytes of an element
  Operand k, v, k_cache, v_cache;  // caches: (page or sequence, slot, head, channel)
  KeyCache cache;                  // lengths before the call; pages and table. Lengths are null where slots are given
  bool by_slots = false;           // slots say where tokens go, not lengths. Without tokens the pointer may be null
  const int64_t* slots = nullptr;  // one per token: page * slots_per_page + slot, or -1
  const int32_t* cu_seqlens = nullptr;  // null: every sequence has `length` new tokens
  int32_t* status = nullptr;            // per sequence, or per token with slots
  int32_t* new_lengths = nullptr;       // per sequence, where wanted: the new tokens included
  int64_t slots_per_page = 0;
  int64_t batch = 0, length = 0, total = 0;  // length: of each sequence, or the bound `total`
  int64_t heads = 0, dim = 0, value_dim = 0;
  void* stream = nullptr;
};

// New tokens [first, first + count) of a sequence, or of the packed tensor, and whether they may be written.
struct NewTokens {
  int64_t batch;  // for the batch stride of k and v
  int64_t first, count;
  int64_t position;  // of the first among the sequence's keys
  bool valid;        // before a look at the pages
};

constexpr NewTokens new_tokens(const CacheAppendCall& c, int64_t b) {
  NewTokens n{b, 0, c.length, c.cache.lengths[b], true};
  if (c.cu_seqlens != nullptr) {
    n.first = c.cu_seqlens[b];
    n.count = int64_t{c.cu_seqlens[b + 1]} - n.first;
    n.valid = n.first >= 0 && n.count >= 0 && n.first + n.count <= c.total;
  }
  n.valid = n.valid && n.position >= 0 && n.position + n.count <= c.cache.max_length;
  return n;
}

// The length a sequence has afterwards, or one that no call over the cache takes.
constexpr int32_t new_length(const NewTokens& n) { return n.valid ? static_cast<int32_t>(n.position + n.count) : -1; }

// Where the strides of the cache say a token's row begins, in elements.
struct CachePlace {
  int64_t page, slot;

  constexpr int64_t offset(const Operand& t, int64_t head) const {
    return page * t.stride[0] + slot * t.stride[1] + head * t.stride[2];
  }
};

constexpr CachePlace place_of_key(const CacheAppendCall& c, int64_t b, int64_t key) {
  return {c.cache.page(b, key), c.cache.slot(key)};
}
constexpr CachePlace place_of_slot(const CacheAppendCall& c, int64_t slot) {
  return {slot / c.slots_per_page, slot % c.slots_per_page};
}
constexpr bool is_slot(const CacheAppendCall& c, int64_t slot) {
  return slot >= 0 && c.slots_per_page > 0 && slot / c.slots_per_page < c.cache.pages;
}

}  // namespace lla::core
