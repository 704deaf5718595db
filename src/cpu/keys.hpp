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

// The same for key after key, without a division each. Nothing from `end` on is looked at, not even in the table.
class KeyCursor {
 public:
  KeyCursor(const core::KeyCache& cache, const core::Operand& t, const core::Sequence& s, int64_t head, int64_t j,
            int64_t end)
      : position_stride_(t.stride[1]), page_stride_(t.stride[0]), page_size_(cache.page_size), key_(j), end_(end) {
    if (j >= end) return;
    offset_ = key_offset(cache, t, s, head, j);
    left_ = page_size_ > 0 ? page_size_ - cache.slot(j) : end - j;
    if (page_size_ == 0) return;
    page_ = cache.table + s.batch * cache.table_stride + j / page_size_;
    head_offset_ = head * t.stride[2];
  }
  int64_t offset() const { return offset_; }
  void next() {
    offset_ += position_stride_;
    if (++key_ >= end_ || --left_ > 0) return;
    // Only pages run out before `end_`, and with pages there is a table.
    offset_ = *++page_ * page_stride_ + head_offset_;  // NOLINT(clang-analyzer-core.NullDereference)
    left_ = page_size_;
  }

 private:
  int64_t position_stride_, page_stride_, page_size_, key_, end_;
  int64_t head_offset_ = 0, offset_ = 0;
  int64_t left_ = 0;  // keys up to the end of the page
  const int32_t* page_ = nullptr;
};

}  // namespace lla::cpu
