// Where a sequence's keys and values lie: in a dense batch, in packed sequences, or in a cache, contiguous or in pages.
#pragma once

#include "cpu/rows.hpp"

namespace lla::cpu {

// Of key j's row in t, which is k or v. Without a cache keys lie one behind the other.
inline int64_t key_offset(const core::KeyCache& cache, const core::Operand& t, const core::Sequence& s, int64_t head,
                          int64_t j) {
  if (cache) return row_offset(t, cache.page(s.batch, j), cache.slot(j), head);
  return row_offset(t, s.batch, s.start_k + j, head);
}

// The same for key after key, without a division each.
class KeyCursor {
 public:
  KeyCursor(const core::KeyCache& cache, const core::Operand& t, const core::Sequence& s, int64_t head, int64_t j,
            int64_t end)
      : cache_(cache), t_(t), sequence_(s), head_(head), key_(j), end_(end) {
    look_up();
  }
  bool at_end() const { return key_ >= end_; }
  int64_t offset() const { return offset_; }
  void next() {
    ++key_;
    offset_ += t_.stride[1];
    if (--left_ == 0) look_up();
  }

 private:
  void look_up() {
    if (at_end()) return;  // nothing behind the end is looked at, not even in the table
    left_ = cache_.page_size > 0 ? cache_.page_size - cache_.slot(key_) : end_ - key_;
    offset_ = key_offset(cache_, t_, sequence_, head_, key_);
  }

  const core::KeyCache& cache_;
  const core::Operand& t_;
  const core::Sequence& sequence_;
  int64_t head_, key_, end_;
  int64_t left_ = 0;  // keys up to the end of the page
  int64_t offset_ = 0;
};

}  // namespace lla::cpu
