// Packed tensors may be longer than their last sequence. What a call writes there is zero, for every implementation:
// such rows take no part, and a caller's next operation (a layer's bias, a weight's gradient) reads them like any
// other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/problem.hpp"
#include "core/text.hpp"

namespace lla::core {

// The rows of one output: `total` positions, in each `heads` x `channels` elements of `width` bytes. Strides in
// elements.
struct PaddedRows {
  void* data = nullptr;
  int64_t total = 0, heads = 0, channels = 0;
  int64_t position = 0, head = 0, channel = 0;  // strides
  int32_t width = 0;
  bool keys = false;  // rows of keys: behind the last entry of cu_seqlens_k
};

// Every output of a packed call that has rows.
struct Padding {
  static constexpr int kMost = 9;  // of a forward call with everything: 3 of information, the output, 5 saved
  PaddedRows rows[kMost];
  int count = 0;
  const int32_t* last_q = nullptr;  // the last entries of cu_seqlens, where those are
  const int32_t* last_k = nullptr;
  // Over a cache cu_seqlens_q may hold anything: rows behind its largest entry belong to no sequence. These many
  // entries before last_q count too.
  int64_t more_entries = 0;

  template <class Call>
  void add_common(const Call& call) {
    const Problem& p = call.problem;
    last_q = call.cu_seqlens_q + p.batch;
    if (p.cache) {
      more_entries = p.batch;
    } else {
      last_k = call.cu_seqlens_k + p.batch;
    }
    for (void* row_info : {static_cast<void*>(call.info.iterations), static_cast<void*>(call.info.residual),
                           static_cast<void*>(call.info.status)}) {
      if (row_info) rows[count++] = {row_info, p.total_q, p.heads_q, 1, 1, p.total_q, 1, 4, false};
    }
  }
  void add(const Operand& t, int64_t total, int64_t heads, int64_t channels, bool keys) {
    if (t)
      rows[count++] = {t.data,      total,       heads,       channels,
                       t.stride[1], t.stride[2], t.stride[3], static_cast<int32_t>(size_of(t.dtype)),
                       keys};
  }

  explicit Padding(const ForwardCall& call) {
    const Problem& p = call.problem;
    add_common(call);
    add(call.o, p.total_q, p.heads_q, p.value_dim, false);
    if (call.saved == nullptr) return;
    const SavedLayout at(p);
    const auto width = static_cast<int32_t>(p.dtype == DType::f64 ? 8 : 4);
    const auto section = [&](int64_t offset, int64_t channels) {
      rows[count++] = {static_cast<char*>(call.saved) + offset * width,
                       p.total_q,
                       p.heads_q,
                       channels,
                       channels,
                       p.total_q * channels,
                       1,
                       width,
                       false};
    };
    section(at.max, 1);
    section(at.omega, 1);
    section(at.mean_k, p.dim);
    section(at.mean_v, p.value_dim);
    section(at.x, p.dim);
  }

  explicit Padding(const BackwardCall& call) {
    const Problem& p = call.problem;
    add_common(call);
    add(call.dq, p.total_q, p.heads_q, p.dim, false);
    add(call.dk, p.total_k, p.heads_kv, p.dim, true);
    add(call.dv, p.total_k, p.heads_kv, p.value_dim, true);
    add(call.dx, p.total_q, p.heads_q, p.dim, false);
    if (p.ridge == RidgeShape::token) add(call.dridge, p.total_q, p.heads_q, 1, false);
    if (p.ridge == RidgeShape::dimension) add(call.dridge, p.total_q, p.heads_q, p.dim, false);
  }
};

// The first position of no sequence.
constexpr int64_t padding_start(const Padding& padding, const PaddedRows& t) {
  const int32_t* const last = t.keys ? padding.last_k : padding.last_q;
  int64_t start = *last;
  if (padding.more_entries == 0) return start;
  for (int64_t i = 1; i <= padding.more_entries; ++i) start = std::max<int64_t>(start, last[-i]);
  return std::max<int64_t>(start, 0);
}

// Where the host can reach them.
inline void zero_on_host(const Padding& padding) {
  for (int i = 0; i < padding.count; ++i) {
    const PaddedRows& t = padding.rows[i];
    for (int64_t position = padding_start(padding, t); position < t.total; ++position) {
      for (int64_t h = 0; h < t.heads; ++h) {
        char* const row = static_cast<char*>(t.data) + (position * t.position + h * t.head) * t.width;
        for (int64_t c = 0; c < t.channels; ++c) std::memset(row + c * t.channel * t.width, 0, t.width);
      }
    }
  }
}

}  // namespace lla::core
