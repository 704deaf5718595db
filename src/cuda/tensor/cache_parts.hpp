// A call over a cache has two parts: decode takes the sequences with few rows, the forward those with many. Which of
// them takes a sequence is a matter of its own rows alone, asked for here by both, on the host and on the device: what
// else is in the batch changes no bit of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/tensor/tensor.hpp"

namespace lla::cuda::tensor {

// Rows of a key head (queries times query heads) up to which a sequence is decoded: each of its rows is solved on its
// own, from its own pass over the keys.
inline constexpr int64_t kMostDecodedRows = 32;

constexpr bool decodes(int64_t length_q, int64_t group, int64_t most_rows = kMostDecodedRows) {
  return length_q * group <= most_rows;
}

// The parts of a call by what the host knows. Where it knows that no sequence has many rows, decode takes all, also
// those that claim more rows than their bound and are invalid for it.
constexpr bool has_forward_part(const core::Problem& p) { return !p.cache || !decodes(p.seqlen_q, p.group()); }
constexpr bool has_decode_part(const core::Problem& p) { return p.cache && (p.packed || !has_forward_part(p)); }

// Bounds of what each part may get.
constexpr int64_t most_decoded_rows(const core::Problem& p) {
  if (!has_forward_part(p)) return p.rows();
  return std::min(p.total_q, p.batch * (kMostDecodedRows / p.group())) * p.heads_q;
}
constexpr int64_t most_forward_sequences(const core::Problem& p) {
  if (!p.cache || !p.packed) return p.batch;
  return std::min(p.batch, p.total_q / (kMostDecodedRows / p.group() + 1));
}

}  // namespace lla::cuda::tensor
